"""The examples of the README that need nothing but torch run."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_example_of_recurrent_layers_runs():
    section = README.read_text(encoding="utf-8").split("## Recurrent layers")[1].split("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    made = {}
    exec(code, made)
    assert type(made["model"][1]).__module__.startswith("torch.nn")
    assert made["output"].shape == (50, 8, 128)
