"""The choice of what recurrent layers stash: which are planned for, and that a graph of another mode is right."""

import pytest
import torch
from torch import Tensor

from tests.capture.joint import capture
from torchecho.capture.stash_modes import alternatives, open_layers, set_modes, smallest
from torchecho.rnn.gru.op import gru
from torchecho.rnn.lstm.op import lstm
from torchecho.rnn.lstm.stash import stash_bytes
from torchecho.rnn.sequence import default_chunk_steps

T, B, H = 9, 4, 6


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (0, [()]),
        (1, [("gates",), ("lean",)]),
        (2, [("gates", "gates"), ("lean", "gates"), ("lean", "lean")]),
    ],
)
def test_the_first_layers_rebuild_first(num_layers: int, expected: list[tuple[str, ...]]) -> None:
    assert alternatives(num_layers) == expected


def test_deep_stacks_go_in_quarters() -> None:
    assert [smallest(modes) for modes in alternatives(10)] == [0, 2, 5, 7, 10]


def weights(gates: int) -> list[Tensor]:
    """Return the weights of a layer of H inputs and units."""
    return [
        torch.randn(shape).requires_grad_() for shape in ((gates * H, H), (gates * H, H), (gates * H,), (gates * H,))
    ]


def two_layers(stash: str) -> tuple[torch.fx.GraphModule, list[torch.fx.Node]]:
    """Return the joint graph of an LSTM layer with a choice and a GRU layer of a given mode."""
    first, second, zeros = weights(4), weights(3), torch.zeros(1, B, H)

    def run(x: Tensor) -> Tensor:
        y, _, _ = lstm(x, None, zeros, zeros, first, "auto")
        return gru(y, None, zeros, second, stash)[0].sum()

    module = capture(run, torch.randn(T, B, H, requires_grad=True)).module
    return module, open_layers(module.graph)


def test_a_mode_that_the_user_chose_is_left_alone() -> None:
    module, layers = two_layers("gates")
    assert [str(layer.target) for layer in layers] == ["torchecho.lstm.default"]
    set_modes(module.graph, layers, ("lean",))
    assert {node.args[4] for node in module.graph.nodes if str(node.target) == "torchecho.gru.default"} == {"gates"}


@pytest.mark.parametrize("mode", ["gates", "lean"])
def test_both_directions_of_a_layer_get_the_mode_and_its_sizes(mode: str) -> None:
    module, layers = two_layers("lean")
    set_modes(module.graph, layers, ("gates",) if mode == "lean" else ("lean",))  # from either to the other
    module, layers = two_layers("auto")
    set_modes(module.graph, layers, (mode, mode))
    calls = [n for n in module.graph.nodes if str(n.target).startswith("torchecho.")]
    assert len(calls) == 4
    assert all(mode in node.args for node in calls)
    kept = sum(value.nbytes for value in layers[0].meta["val"][3:])
    assert kept == stash_bytes(mode, T=T, B=B, H=H, chunk_steps=default_chunk_steps(B, H))
    for user in layers[0].users:
        assert user.meta["val"] is layers[0].meta["val"][user.args[1]]
