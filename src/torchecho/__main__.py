"""What ``python -m torchecho`` runs: the same as the ``torchecho`` program."""

import sys

from torchecho.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
