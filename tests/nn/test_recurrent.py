"""Cells of the user's own over whole sequences, against a loop written here; the lean stash against the plain one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from torchecho.errors import OptionError
from torchecho.nn import Recurrent

T, B, I, H = 11, 4, 3, 5  # noqa: E741 - as everywhere, I is the number of inputs


class Noisy(nn.Module):
    """A cell with two states, one inside a dict, an output of another size, and random numbers in training."""

    def __init__(self, inputs=I, p=0.0):
        super().__init__()
        self.mix, self.out, self.p = nn.Linear(inputs + H, 2 * H), nn.Linear(H, 2), p

    def initial_state(self, x):
        return x.new_zeros(x.shape[0], H), {"slow": x.new_ones(x.shape[0], H)}

    def forward(self, x, state):
        h, memory = state
        gate, value = self.mix(torch.cat((x, h), 1)).chunk(2, 1)
        slow = F.dropout(0.9 * memory["slow"] + value.tanh(), self.p, self.training)
        h = gate.sigmoid() * slow.tanh()
        return self.out(h), (h, {"slow": slow})


class Torch(nn.LSTMCell):
    def initial_state(self, x):
        zeros = x.new_zeros(x.shape[0], self.hidden_size)
        return zeros, zeros

    def forward(self, x, state):
        h, c = super().forward(x, state)
        return h, (h, c)


def by_hand(cell, x, reverse=False):
    state, outputs = cell.initial_state(x[0]), []
    for t in reversed(range(len(x))) if reverse else range(len(x)):
        y, state = cell(x[t], state)
        outputs.append(y)
    return torch.stack(outputs[::-1] if reverse else outputs), state


def gradients(model, x, seed=0):
    torch.manual_seed(seed)
    y, (h, memory) = model(x)
    return [y, *torch.autograd.grad((y**2).sum() + h.sum() + (memory["slow"] ** 3).sum(), [x, *model.parameters()])]


@pytest.mark.parametrize("chunk_steps", [None, 1, 4, 11, 20])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_lean_has_the_bits_of_the_plain_loop(chunk_steps, p):
    cell, x = Noisy(p=p), torch.randn(T, B, I, requires_grad=True)
    model = Recurrent(cell, stash="all")
    plain = gradients(model, x)
    lean = gradients(Recurrent(cell, stash="lean", chunk_steps=chunk_steps), x)
    torch.manual_seed(0)
    assert torch.equal(plain[0], by_hand(cell, x)[0])
    assert len(plain) == 2 + len(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(plain, lean, strict=True))


def test_lean_leaves_the_generator_where_the_plain_loop_does():
    cell, x = Noisy(p=0.3), torch.randn(T, B, I, requires_grad=True)
    after = []
    for stash in ("all", "lean"):
        gradients(Recurrent(cell, stash=stash), x)
        after.append(torch.get_rng_state())
    assert torch.equal(*after)


def test_lean_keeps_states_between_chunks_only():
    def saved_elements(stash):
        seen = {}

        def keep(tensor):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4, tensor
            return tensor

        x = torch.randn(100, B, I)
        model = Recurrent(Noisy(), stash=stash)
        own = sum(p.numel() for p in model.parameters())
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(x)
        return sum(size for size, _ in seen.values()) - own

    # Ten chunks: nothing of their insides is saved where these hooks see it, and the outputs are the caller's.
    assert saved_elements("all") > 100 * B * 4 * H
    assert saved_elements("lean") < 10 * B * 4 * H


@pytest.mark.parametrize("stash", ["all", "lean"])
def test_first_and_second_derivatives(stash):
    cell = Noisy().double()
    model = Recurrent(cell, stash=stash, chunk_steps=2 if stash == "lean" else None)
    x = torch.randn(5, 2, I, dtype=torch.double, requires_grad=True)
    state = (torch.randn(2, H).double().requires_grad_(), {"slow": torch.randn(2, H).double().requires_grad_()})

    def run(x, h, slow, *_):
        y, (h, memory) = model(x, (h, {"slow": slow}))
        return y, h, memory["slow"]

    leaves = (x, state[0], state[1]["slow"], *cell.parameters())
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("stash", ["all", "lean"])
def test_layers_and_directions_are_those_of_torch(stash):
    theirs = nn.LSTM(I, H, 2, bidirectional=True, batch_first=True)
    cells = []
    for layer in range(2):
        for suffix in ("", "_reverse"):
            cell = Torch(I if layer == 0 else 2 * H, H)
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                getattr(cell, name).data = getattr(theirs, f"{name}_l{layer}{suffix}").data
            cells.append(cell)
    ours = Recurrent(cells, bidirectional=True, batch_first=True, stash=stash)
    x, states = torch.randn(B, T, I), [(torch.randn(B, H), torch.randn(B, H)) for _ in cells]
    hx = tuple(torch.stack(parts) for parts in zip(*states, strict=True))
    packed = pack_padded_sequence(x, torch.tensor([5, 11, 1, 7]), batch_first=True, enforce_sorted=False)
    for given in (x, packed):
        (want, (h, c)), (have, last) = theirs(given, hx), ours(given, states)
        if given is packed:
            want, have = (pad_packed_sequence(y)[0] for y in (want, have))
        torch.testing.assert_close(have, want)
        torch.testing.assert_close(torch.stack([state[0] for state in last]), h)
        torch.testing.assert_close(torch.stack([state[1] for state in last]), c)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("stash", ["all", "lean"])
def test_unbatched_input_is_a_batch_of_one(stash, batch_first):
    model = Recurrent([Noisy(), Noisy(), Noisy(4), Noisy(4)], bidirectional=True, batch_first=batch_first, stash=stash)
    x = torch.randn(T, I)
    states = [(torch.randn(H), {"slow": torch.randn(H)}) for _ in model.cells]
    one = [(h[None], {"slow": memory["slow"][None]}) for h, memory in states]
    for given, hx in ((None, None), (states, one)):
        y, last = model(x, given)
        want, want_last = model(x[None] if batch_first else x[:, None], hx)
        assert torch.equal(y, want.squeeze(0 if batch_first else 1))
        for (h, memory), (want_h, want_memory) in zip(last, want_last, strict=True):
            assert torch.equal(h, want_h[0])
            assert torch.equal(memory["slow"], want_memory["slow"][0])
    with pytest.raises(ValueError, match="2-D or 3-D input, got 1-D"):
        model(x[0])


def test_packed_sequences_are_run_one_by_one():
    cell, lengths = Noisy(), [7, 2, 2, 1]
    x = torch.randn(7, B, I)
    for reverse in (False, True):
        model = Recurrent([Noisy(), cell], bidirectional=True) if reverse else Recurrent(cell)
        y, last = model(pack_padded_sequence(x, torch.tensor(lengths)))
        padded = pad_packed_sequence(y)[0]
        for b, length in enumerate(lengths):
            want, state = by_hand(cell, x[:length, b : b + 1], reverse)
            torch.testing.assert_close(padded[:length, b : b + 1, -2:], want)
            torch.testing.assert_close((last[1] if reverse else last)[0][b : b + 1], state[0])


def test_dropout_between_layers_in_training_only():
    model = Recurrent([Noisy(), Noisy(2)], dropout=1.0, stash="all")
    x = torch.randn(T, B, I)
    dropped = model(x)[0]
    assert torch.equal(dropped, by_hand(model.cells[1], x.new_zeros(T, B, 2))[0])
    model.eval()
    assert torch.equal(model(x)[0], by_hand(model.cells[1], by_hand(model.cells[0], x)[0])[0])


def test_state_dict_round_trip():
    one, other = Recurrent([Noisy(), Noisy(2)]), Recurrent([Noisy(), Noisy(2)])
    other.load_state_dict(one.state_dict())
    x = torch.randn(T, B, I)
    assert torch.equal(one(x)[0], other(x)[0])


def test_errors_say_what_was_asked():
    x = torch.randn(T, B, I)
    with pytest.raises(OptionError, match="no stash mode of Recurrent"):
        Recurrent(Noisy(), stash="gates")
    with pytest.raises(OptionError, match="one cell for each layer and direction"):
        Recurrent(Noisy(), bidirectional=True)
    with pytest.raises(OptionError, match="no initial_state"):
        Recurrent(nn.LSTMCell(I, H))(x)
    with pytest.raises(OptionError, match=r"must return \(output, state\)"):
        Recurrent(nn.GRUCell(I, H))(x, torch.zeros(B, H))
    with pytest.raises(OptionError, match="4 rows, one a sequence"):
        Recurrent(nn.GRUCell(I, H))(x, torch.zeros(B + 1, H))
    with pytest.raises(OptionError, match="chunk_steps"):
        Recurrent(Noisy(), chunk_steps=0)


@pytest.mark.parametrize("change", ["weight", "input", "state"])
def test_what_a_chunk_reads_may_not_change_before_the_backward(change):
    """As autograd says of the plain loop; made again from something else, gradients would be wrong and nobody told."""
    cell = nn.GRUCell(4, 7)
    module = Recurrent(_Twice(cell), stash="lean")
    x, h = torch.randn(9, 3, 4), torch.zeros(3, 7)
    y, _ = module(x, h)
    with torch.no_grad():
        {"weight": cell.weight_hh, "input": x, "state": h}[change].add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace|changed in place"):
        y.square().sum().backward()


class _Twice(nn.Module):
    """Returns its state as the output, too."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x, h):
        h = self.cell(x, h)
        return h, h
