"""Swapping modules of a model in place, and back."""

import copy

import pytest
import torch
from torch import nn

import torchecho
import torchecho.nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.encoder = nn.LSTM(6, 8, 2, bidirectional=True, batch_first=True)
        self.parts = nn.ModuleDict({"gru": nn.GRU(16, 5), "rnn": nn.RNN(5, 4, nonlinearity="relu")})
        self.tied = self.encoder

    def forward(self, tokens):
        x, _ = self.encoder(self.embed(tokens))
        x, _ = self.parts["gru"](x)
        return self.parts["rnn"](x)[0]


def test_converts_and_reverts_with_the_same_parameters():
    model = Model()
    before, names = dict(model.named_parameters()), list(model.state_dict())
    tokens = torch.randint(10, (3, 7))
    expected = model(tokens)
    assert torchecho.nn.convert(model, stash="gates") is model
    assert [type(m) for m in (model.encoder, *model.parts.values())] == [
        torchecho.nn.LSTM,
        torchecho.nn.GRU,
        torchecho.nn.RNN,
    ]
    assert model.tied is model.encoder
    assert (model.encoder.stash, model.parts["gru"].stash, model.parts["rnn"].stash) == ("gates", "gates", "auto")
    assert all(p is before[name] for name, p in model.named_parameters())
    torch.testing.assert_close(model(tokens), expected)
    assert torchecho.nn.revert(model) is model
    assert type(model.encoder) is nn.LSTM
    assert repr(model) == repr(Model())
    assert list(model.state_dict()) == names
    assert all(p is before[name] for name, p in model.named_parameters())
    assert torch.equal(model(tokens), expected)
    torch.testing.assert_close(copy.deepcopy(model)(tokens), expected)


def test_a_module_by_itself_is_replaced():
    theirs = nn.LSTM(3, 4, proj_size=2)
    ours = torchecho.nn.convert(theirs)
    assert isinstance(ours, torchecho.nn.LSTM)
    assert ours.weight_hr_l0 is theirs.weight_hr_l0
    back = torchecho.nn.revert(ours)
    assert back._flat_weights[0] is theirs.weight_ih_l0
    assert back.mode == "LSTM"


def test_subclasses_and_parametrized_modules_are_left_alone():
    class Own(nn.GRU):
        pass

    model = nn.ModuleList([Own(3, 4), nn.utils.parametrizations.weight_norm(nn.RNN(3, 4), "weight_hh_l0")])
    kinds = [type(m) for m in model]
    assert [type(m) for m in torchecho.nn.convert(model)] == kinds


def test_hooks_and_training_mode_stay():
    model = nn.Sequential(nn.GRU(3, 4)).eval()
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append("forward"))
    torchecho.nn.convert(model)(torch.zeros(2, 1, 3))
    assert calls == ["forward"]
    assert not model[0].training


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="gates, preact, cell, lean"):
        torchecho.nn.convert(Model(), stash="none")


def test_is_a_public_name():
    assert torchecho.nn.LSTM.__name__ == "LSTM"
    assert "nn" in dir(torchecho)


@pytest.mark.parametrize("call", [torchecho.nn.convert, torchecho.nn.revert])
def test_what_is_no_module_is_named(call):
    with pytest.raises(torchecho.OptionError, match=f"{call.__name__} takes a torch.nn.Module, found int"):
        call(3)
