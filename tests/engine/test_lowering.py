"""Which graphs Inductor lowers, and why the others are lowered eagerly."""

import pytest
import torch
from torch import fx, nn

from torchecho.engine import lowering
from torchecho.engine.lowering import choose_lowering, num_calls, why_not_inductor


def graph(calls: int) -> fx.GraphModule:
    """Return a graph of so many additions."""
    made = fx.Graph()
    value = made.placeholder("x")
    for _ in range(calls):
        value = made.call_function(torch.add, (value, 1))
    made.output(value)
    return fx.GraphModule(nn.Module(), made)


@pytest.fixture(autouse=True)
def _with_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "_has_compiler", lambda: True)


def test_auto_takes_inductor_for_small_graphs_only() -> None:
    x = [torch.ones(2)]
    assert choose_lowering(graph(10), x, "auto") == ("inductor", "")
    chosen, why = choose_lowering(graph(1001), x, "auto")
    assert (chosen, "1001 calls" in why) == ("eager", True)
    assert choose_lowering(graph(1001), x, "inductor")[0] == "inductor"
    assert choose_lowering(graph(10), x, "eager") == ("eager", "")


def test_without_a_compiler_auto_lowers_eagerly_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "_has_compiler", lambda: False)
    assert choose_lowering(graph(10), [torch.ones(2)], "auto") == ("eager", "no C++ compiler was found")


def test_other_devices_are_lowered_eagerly() -> None:
    assert "on meta" in why_not_inductor([torch.ones(2), torch.ones(2, device="meta")])


def test_time_steps_of_recurrent_modules_count_as_unrolled() -> None:
    made = fx.Graph()
    x = made.placeholder("x")
    x.meta["example_value"] = torch.zeros(50, 4, 8)
    made.output(
        made.call_function(torch._VF.lstm, (x, (x, x), [x] * 8, True, 2))
    )  # 2 layers: 50 steps of 20 calls each
    assert num_calls(fx.GraphModule(nn.Module(), made)) == 50 * 2 * 20
