"""The scratch of the operators as it is foretold, against what the allocator counts."""

import pytest
import torch
from torch.utils._pytree import tree_map

from tests.rnn.layers import EVERY, asked_for, case, runnable, weights_like
from tests.rnn.test_variants import SWITCHES, Layer
from torchecho.meter.ops import measure_op
from torchecho.rnn import workspace
from torchecho.rnn.sequence import default_chunk_steps

SIZES = {
    "many steps": {"T": 60, "B": 32, "I": 96, "H": 160},
    "large weights": {"T": 4, "B": 2, "I": 300, "H": 320},
    "packed both ways": {"T": 40, "B": 16, "I": 64, "H": 128, "directions": 2, "lengths": [40] * 8 + [20] * 8},
}


def close_to_measured(target, arguments):
    arguments = tree_map(lambda a: a.detach() if isinstance(a, torch.Tensor) else a, arguments)
    _, measured = measure_op(target, arguments, {}, budget_seconds=0.0)
    return workspace.workspace_bytes(target, arguments) == pytest.approx(measured, rel=0.1, abs=2**13)


def both(name, inputs, kept):
    """Return the operator's call and that of its backward, with the sizes that they have in a step."""
    ops = torch.ops.torchecho
    forward, backward = getattr(ops, name).default, getattr(ops, f"{name}_backward").default
    with torch.no_grad():
        made = forward(*inputs)
    gradients = weights_like(made[:kept])
    return [(forward, inputs), (backward, (*inputs, made[0], *made[kept:], *gradients, True, True))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("family", "mode"), EVERY)
def test_scratch_is_foretold(family, mode, sizes, dtype):
    assert_scratch_is_foretold(family, mode, sizes, dtype)


@pytest.mark.skipif(not runnable("avx512bf16"), reason="this processor multiplies no pairs of bfloat16")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("family", "mode"), EVERY)
@pytest.mark.parametrize("variant", ["avx512bf16", "avx512"])
def test_scratch_of_bfloat16_is_foretold_in_pairs_and_in_floats(family, mode, sizes, variant):
    with asked_for(variant):
        assert_scratch_is_foretold(family, mode, sizes, torch.bfloat16)


def assert_scratch_is_foretold(family, mode, sizes, dtype):
    layer = case(family, **SIZES[sizes], dtype=dtype)
    B, H = layer.states[0].shape[1:]
    inputs = (layer.x, layer.batch_sizes, *layer.states, layer.weights, mode, default_chunk_steps(B, H))
    for target, arguments in both(family, inputs, 1 + len(layer.states)):
        assert close_to_measured(target, arguments), target


@pytest.mark.parametrize("mode", ["gates", "lean"])
@pytest.mark.parametrize("switches", [SWITCHES[0], SWITCHES[-1]], ids=["none", "all"])
def test_scratch_of_variants_is_foretold(switches, mode):
    layer = Layer(switches, "both", T=60, B=32, I=96, H=160)
    options = (*layer.switches.values(), 0.0, 0.0, mode, default_chunk_steps(32, 160))
    inputs = (layer.x, None, *layer.states, layer.weights, *layer.drawn, *options)
    for target, arguments in both("lstm_variant", inputs, 3):
        assert close_to_measured(target, arguments), target


def test_other_types_and_ops_are_not_known():
    layer = case("gru", T=3, B=2, I=3, H=4, dtype=torch.float64)
    inputs = (layer.x, None, *layer.states, layer.weights, "lean", 2)
    assert workspace.workspace_bytes(torch.ops.torchecho.gru.default, inputs) == 0
    assert workspace.is_known(torch.ops.torchecho.gru.default)
    assert not workspace.is_known(torch.ops.aten.mm.default)
