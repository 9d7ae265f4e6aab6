"""Find and import the translator example, which is no part of the package's own code."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torchecho
from torchecho.errors import OptionError

_ALIAS = "torchecho_examples"


class Example(NamedTuple):
    """The example's modules."""

    corpus: Any
    batches: Any
    model: Any
    train: Any


def checkout() -> Path | None:
    """Return the folder of the source checkout that this package runs from; None when it is installed without one."""
    root = Path(torchecho.__file__).resolve().parents[2]
    return root if (root / "examples" / "nmt" / "train.py").is_file() else None


def load_example() -> Example:
    """Import ``examples/nmt`` from the checkout, or the copy that the installed package carries.

    Raises:
        OptionError: neither is there.
    """
    root = checkout()
    folder = root / "examples" if root else Path(torchecho.__file__).resolve().parent / "_examples"
    if not (folder / "nmt" / "train.py").is_file():
        raise OptionError(f"the translator example is missing: looked for {folder / 'nmt'}; install torchecho anew")
    if _ALIAS not in sys.modules:
        # A package under a name of our own: the user's may have one that is called nmt or examples.
        package = ModuleType(_ALIAS)
        package.__path__ = [str(folder)]
        sys.modules[_ALIAS] = package
    return Example(*(importlib.import_module(f"{_ALIAS}.nmt.{name}") for name in Example._fields))


def read_pairs(example: Example, language: str, corpus: str | None) -> Any:
    """Read the parallel text: a file of the user's, or Django's catalogues.

    Raises:
        OptionError: the text is missing or cannot be read.
    """
    try:
        return example.corpus.read_tsv(Path(corpus)) if corpus else example.corpus.read_django(language)
    except example.corpus.CorpusError as error:
        raise OptionError(str(error)) from None
