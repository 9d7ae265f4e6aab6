"""What is seen of a training: optimizers, steps, backwards."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchecho.engine.trainer import Trainer
from torchecho.meter.optimizer import optimizer_bytes


def test_steps_of_optimizers_count():
    model, trainer = nn.Linear(2, 2), Trainer()
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainer.watching():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            before.step()
        optimizer_bytes(optimizer)  # steps a copy
    optimizer.step()
    assert trainer.optimizers == [optimizer]
    assert (trainer.num_optimizer_steps, trainer.num_backwards, trainer.num_steps) == (3, 3, 3)


def test_without_an_optimizer_backwards_count_once_each():
    trainer, leaf = Trainer(), torch.ones(2, requires_grad=True)
    with trainer.watching():
        checkpoint(torch.exp, leaf, use_reentrant=True).sum().backward()  # its backward runs another inside
        leaf.sum().backward()
        with pytest.raises(RuntimeError, match="grad"):
            torch.ones(2).sum().backward()
    leaf.sum().backward()
    assert trainer.num_steps == trainer.num_backwards == 2


def test_optimizers_are_not_kept_alive():
    trainer = Trainer()
    with trainer.watching():
        torch.optim.Adam(nn.Linear(2, 2).parameters())
    gc.collect()
    assert trainer.optimizers == []


def test_the_optimizers_of_a_step_hold_its_parameters_or_what_its_backward_reached():
    encoder, decoder, other = nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(16, 16)
    trainer = Trainer()
    with trainer.watching():
        first, second, third = (torch.optim.Adam(m.parameters()) for m in (encoder, decoder, other))
    found = trainer.bytes_of(encoder)
    decoder(encoder(torch.ones(1, 4))).sum().backward()
    assert trainer.optimizers_of(encoder) == [first, second]
    assert trainer.optimizers_of(other) == [first, second, third]
    numbers = (4 * 4 + 4) + (4 * 8 + 8)
    assert found.state_bytes == 2 * 4 * numbers + 4 * 4
    assert found.step_bytes == max(optimizer_bytes(one).step_bytes for one in (first, second))


def test_a_model_that_is_gone_needs_nothing():
    found = Trainer().bytes_of(nn.Linear(2, 2))
    gc.collect()
    assert (found.state_bytes, found.step_bytes) == (0, 0)
