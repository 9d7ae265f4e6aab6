"""Derivatives that the kernels do not give: forward mode, transforms of torch.func, batches of gradients, exports."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import torchecho.nn
from tests.nn.test_modules import KINDS, B, H, I, T, pair

STEP = 1e-6  # in double precision


def slope(module, x: Tensor) -> Tensor:
    """Return how the output changes with all inputs, by torch.nn in double precision."""
    module = module.double()
    above, below = module(x.double() + STEP)[0], module(x.double() - STEP)[0]
    module.float()
    return ((above - below) / (2 * STEP)).float()


@pytest.mark.parametrize("kind", KINDS)
def test_forward_mode(kind):
    theirs, ours = pair(kind, I, H, 2, bidirectional=True)
    x = torch.randn(T, B, I)
    _, found = torch.func.jvp(lambda x: ours(x)[0], (x,), (torch.ones_like(x),))
    expected = slope(theirs, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad(), forward_ad.dual_level():
        made = ours(forward_ad.make_dual(x, torch.ones_like(x)))[0]
        torch.testing.assert_close(forward_ad.unpack_dual(made).tangent, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_each_sequence(kind):
    theirs, ours = pair(kind, I, H)
    x = torch.randn(T, B, I)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(ours, parameters, (x.unsqueeze(1),))[0].square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 1))(dict(ours.named_parameters()), x)
    for b in range(B):
        expected = torch.autograd.grad(theirs(x[:, b : b + 1])[0].square().sum(), list(theirs.parameters()))
        for found, want in zip(each.values(), expected, strict=True):
            torch.testing.assert_close(found[b], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_inputs(kind):
    theirs, ours = pair(kind, I, H)
    x = torch.randn(3, T, B, I)
    with torch.no_grad():
        found = torch.func.vmap(lambda x: ours(x)[0])(x)
    torch.testing.assert_close(found, torch.stack([theirs(one)[0] for one in x]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_gradients(kind):
    theirs, ours = pair(kind, I, H)
    x, incoming = torch.randn(T, B, I), torch.randn(3, T, B, H)
    found = torch.autograd.grad(ours(x)[0], list(ours.parameters()), incoming, is_grads_batched=True)
    expected = [torch.autograd.grad(theirs(x)[0], list(theirs.parameters()), one) for one in incoming]
    for place, one in enumerate(found):
        torch.testing.assert_close(one, torch.stack([of[place] for of in expected]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "module",
    [
        torchecho.nn.LSTM(I, H),
        torchecho.nn.GRU(I, H, stash="gates"),
        torchecho.nn.RNN(I, H),
        torchecho.nn.VariantLSTM(I, H, peephole=True),
    ],
    ids=lambda module: type(module).__name__,
)
def test_exported_where_no_gradient_was_wanted_and_trained(module):
    x = torch.randn(T, B, I)
    with torch.no_grad():
        exported = torch.export.export(module, (x,)).module()
    found = torch.autograd.grad(exported(x)[0].square().sum(), list(exported.parameters()))
    expected = torch.autograd.grad(module(x)[0].square().sum(), list(module.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
