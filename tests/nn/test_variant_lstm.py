"""VariantLSTM: arguments, parameters, packed against padded input, and the statistics of its noise."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from torchecho.errors import OptionError
from torchecho.nn import VariantLSTM, convert, revert

T, B, I, H = 6, 5, 4, 7  # noqa: E741 - as everywhere, I is the number of inputs
EVERY = {"layer_norm": True, "peephole": True, "coupled": True, "recurrent_dropout": 0.3, "zoneout": (0.2, 0.1)}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("projection", [0, 3])
def test_without_variations_it_is_an_lstm(projection):
    arguments = {"bidirectional": True, "proj_size": projection}
    theirs, ours = nn.LSTM(I, H, 2, **arguments), VariantLSTM(I, H, 2, **arguments)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(T, B, I)
    (want, states), (have, ours_states) = theirs(x), ours(x)
    torch.testing.assert_close(have, want)
    torch.testing.assert_close(ours_states, states)


def test_parameters_have_the_shapes_of_the_docs():
    module = VariantLSTM(I, H, bidirectional=True, layer_norm=True, peephole=True)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters() if not name.endswith("reverse")}
    assert shapes == {
        "weight_ih_l0": (4 * H, I),
        "weight_hh_l0": (4 * H, H),
        "bias_ih_l0": (4 * H,),
        "bias_hh_l0": (4 * H,),
        "norm_ih_l0": (4 * H,),
        "norm_hh_l0": (4 * H,),
        "norm_c_l0": (H,),
        "norm_c_bias_l0": (H,),
        "peephole_l0": (3 * H,),
    }
    assert len(list(module.parameters())) == 2 * len(shapes)
    assert all(bool((getattr(module, f"norm_{part}_l0") == 1).all()) for part in ("ih", "hh", "c"))
    assert all(bool((p == 0).all()) for name, p in module.named_parameters() if "bias" in name)
    coupled = VariantLSTM(I, H, bias=False, coupled=True, peephole=True, layer_norm=True)
    assert tuple(coupled.weight_hh_l0.shape) == (3 * H, H)
    assert tuple(coupled.peephole_l0.shape) == (2 * H,)
    assert not any("bias" in name for name, _ in coupled.named_parameters())


@pytest.mark.parametrize("projection", [0, 3])
@pytest.mark.parametrize("stash", ["gates", "lean"])
def test_packed_is_padded_row_by_row(stash, projection):
    sizes = {"bidirectional": True, "batch_first": True, "proj_size": projection}
    module = VariantLSTM(I, H, 2, **sizes, stash=stash, **EVERY).eval()
    x, lengths = torch.randn(B, T, I), [3, 6, 1, 4, 6]
    packed = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
    y, (h, c) = module(packed)
    y = pad_packed_sequence(y, batch_first=True)[0]
    for b, length in enumerate(lengths):
        want, (want_h, want_c) = module(x[b, :length])
        torch.testing.assert_close(y[b, :length], want)
        torch.testing.assert_close(h[:, b], want_h)
        torch.testing.assert_close(c[:, b], want_c)


def test_bfloat16_and_autocast_are_computed_in_float32():
    module = VariantLSTM(I, H, 2, proj_size=3, layer_norm=True, peephole=True).bfloat16()
    x = torch.randn(T, B, I).bfloat16()
    exact = copy.deepcopy(module).float()
    y, (h, c) = module(x)
    want, (want_h, want_c) = exact(x.float())
    assert all(torch.equal(a, b.bfloat16()) for a, b in ((y, want), (h, want_h), (c, want_c)))
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in module.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(exact(x.float())[0], want.bfloat16())


def test_non_contiguous_input_states_and_weights():
    module, x = VariantLSTM(I, H, **EVERY).eval(), torch.randn(B, T, 2 * I)
    hx = torch.randn(2, 1, H, B).transpose(2, 3).unbind(0)
    with torch.no_grad():
        module.weight_hh_l0.data = module.weight_hh_l0.data.t().contiguous().t()
        found = module(x.transpose(0, 1)[:, :, ::2], hx)
        expected = module(x.transpose(0, 1)[:, :, ::2].contiguous(), tuple(state.contiguous() for state in hx))
    assert torch.equal(found[0], expected[0])


def test_state_dict_copies_and_pickles():
    one, other = VariantLSTM(I, H, 2, **EVERY), VariantLSTM(I, H, 2, **EVERY)
    other.load_state_dict(one.state_dict())
    x, results = torch.randn(T, B, I), []
    for module in (one, other, copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        torch.manual_seed(0)
        results.append(module(x)[0])
    assert all(torch.equal(results[0], result) for result in results)


def test_recurrent_dropout_has_one_mask_a_sequence_and_its_expectation():
    module = VariantLSTM(I, 1000, recurrent_dropout=0.2)
    x, h0 = torch.randn(T, B, I), torch.zeros(1, B, 1000)
    drop, cell, hidden = module._drawn(x, h0, h0)
    assert drop.shape == (1, B, 1000)
    assert (cell, hidden) == (None, None)
    kept = drop != 0
    assert torch.equal(drop[kept], torch.full_like(drop[kept], 1 / 0.8))
    # 5000 draws: a standard deviation of the share is 0.0057.
    assert abs(float(kept.double().mean()) - 0.8) < 6 * 0.0057
    torch.manual_seed(0)
    assert not torch.equal(module(x)[0], module(x)[0])
    plain = VariantLSTM(I, 1000)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module.eval()(x)[0], plain(x)[0])


def test_dropping_all_of_h_cuts_the_recurrent_weights_off():
    module = VariantLSTM(I, H, recurrent_dropout=1.0)
    module(torch.randn(T, B, I))[0].sum().backward()
    assert not module.weight_hh_l0.grad.any()
    assert module.weight_ih_l0.grad.any()


def test_zoneout_keeps_units_as_often_as_asked():
    module = VariantLSTM(I, 500, zoneout=(0.3, 0.1))
    x = torch.randn(10, B, I)
    zeros = torch.zeros(1, B, 500)
    _, cell, hidden = module._drawn(x, zeros, zeros)
    assert cell.shape == (1, 10 * B, 500)
    # 25,000 draws: standard deviations of 0.0029 and 0.0019.
    assert abs(float(cell.double().mean()) - 0.3) < 6 * 0.0029
    assert abs(float(hidden.double().mean()) - 0.1) < 6 * 0.0019
    y, _ = module(x)
    stayed = (y[1:] == y[:-1]).double().mean()
    assert abs(float(stayed) - 0.1) < 6 * 0.002


@pytest.mark.parametrize("training", [True, False])
def test_full_zoneout_holds_the_states(training):
    module = VariantLSTM(I, H, zoneout=1.0).train(training)
    hx = (torch.randn(1, B, H), torch.randn(1, B, H))
    y, last = module(torch.randn(T, B, I), hx)
    torch.testing.assert_close(y, hx[0].expand(T, B, H))
    torch.testing.assert_close(last, hx)


def test_evaluation_is_the_expectation_of_one_step():
    module = VariantLSTM(I, H, zoneout=(0.4, 0.25))
    x, hx = torch.randn(1, 1, I), (torch.randn(1, 1, H), torch.randn(1, 1, H))
    with torch.no_grad():
        many = [t.expand(1, 20_000, -1).contiguous() for t in hx]
        y, (_, c) = module(x.expand(1, 20_000, -1), tuple(many))
        expected, (_, expected_c) = module.eval()(x, hx)
    # The largest deviation of one draw is half the distance between both outcomes; 6 deviations of the mean of 20,000.
    tolerance = 6 * 2.5 / 20_000**0.5
    torch.testing.assert_close(y.mean(1), expected[:, 0], rtol=0, atol=tolerance)
    torch.testing.assert_close(c.mean(1), expected_c[:, 0], rtol=0, atol=tolerance)


def test_converting_leaves_it_alone():
    model = nn.Sequential(VariantLSTM(I, H, layer_norm=True))
    first = model[0]
    assert revert(convert(model))[0] is first


def test_says_what_it_is_and_what_is_wrong():
    assert repr(VariantLSTM(I, H, **EVERY)) == (
        "VariantLSTM(4, 7, layer_norm=True, peephole=True, coupled=True, recurrent_dropout=0.3, zoneout=(0.2, 0.1))"
    )
    with pytest.raises(ValueError, match="smaller than hidden_size"):
        VariantLSTM(I, H, proj_size=H)
    with pytest.raises(ValueError, match="zoneout must be a probability"):
        VariantLSTM(I, H, zoneout=1.5)
    with pytest.raises(ValueError, match="recurrent_dropout must be a probability"):
        VariantLSTM(I, H, recurrent_dropout=-0.1)
    with pytest.raises(TypeError, match="layer_norm must be of type bool"):
        VariantLSTM(I, H, layer_norm=1)
    with pytest.raises(OptionError, match="no stash mode of VariantLSTM"):
        VariantLSTM(I, H, stash="cell")
