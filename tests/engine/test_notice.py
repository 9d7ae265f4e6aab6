"""Which line of the program a warning shows."""

import pytest
import torch
from torch import nn

import torchecho
from torchecho.engine.notice import warn


def _line_of(text: str) -> int:
    with open(__file__) as file:  # noqa: PTH123 - a file of this test's own
        return next(number for number, line in enumerate(file, 1) if text in line)


def test_a_warning_shows_the_line_that_called() -> None:
    with pytest.warns(torchecho.EchoWarning, match="^torchecho: left undone$") as told:
        warn("left undone")  # called here
    assert (told[0].filename, told[0].lineno) == (__file__, _line_of("# called here"))


def _step(model: nn.Module) -> None:
    loss = model(torch.ones(2, 4)).sum()  # the compile engine plans here
    loss.backward()  # the eager engine plans here


@pytest.mark.parametrize(("engine", "lowering"), [("eager", "auto"), ("compile", "eager")])
def test_a_step_that_runs_untouched_is_shown_at_the_programs_line(
    engine: str, lowering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no costs")

    for room in ("draft", "planning"):
        monkeypatch.setattr(f"torchecho.engine.{room}.price", fails)
    model = torchecho.optimize(nn.Linear(4, 4), max_slowdown=0.1, engine=engine, lowering=lowering)
    with pytest.warns(torchecho.EchoWarning, match="runs untouched") as told:
        _step(model)
    assert (told[0].filename, told[0].lineno) == (__file__, _line_of(f"# the {engine} engine"))
