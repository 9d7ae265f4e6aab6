"""What a forward reads and something changes before the backward: the same bits, and no error that PyTorch has not."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchecho
from torchecho.engine import boundaries, scope

ROWS, SIZE, STEPS = 256, 32, 5
# The first step follows no plan, or a plan of its own; the others one that recomputes whatever it may.
OPTIONS = ({"max_slowdown": 20.0}, {"memory_budget": "400KiB"})


class Codebook(nn.Module):
    """Reads a parameter that nobody differentiates, and changes it."""

    def __init__(self, change: Callable[[nn.Parameter, Tensor], None], every: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.code = nn.Parameter(torch.randn(SIZE, SIZE), requires_grad=False)
        self.change, self.every, self.num_steps = change, every, 0

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tanh(self.first(x))
        read = made.detach() @ self.code
        if self.num_steps % self.every == self.every - 1:
            self.change(self.code, self.code.detach() * 0.9)
        self.num_steps += 1
        return torch.sigmoid(self.last(torch.sin(made) * torch.sigmoid(read))).mean()


def _give_other_data(code: nn.Parameter, new: Tensor) -> None:
    code.data = new


def _give_other_data_and_write(code: nn.Parameter, new: Tensor) -> None:
    code.data = new
    with torch.no_grad():
        code.mul_(0.9)


def _write_data(code: nn.Parameter, new: Tensor) -> None:
    code.data.copy_(new)


@torch.no_grad()
def _write(code: nn.Parameter, new: Tensor) -> None:
    code.copy_(new)


class Renormed(nn.Module):
    """Looks up an embedding twice, which shortens its rows in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(SIZE, SIZE, max_norm=1.0), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (torch.tanh(self.embedding((x[:, i] * 9).long().abs() % SIZE)) for i in (0, 1))
        return torch.sigmoid(self.last(first * 0.5 + second)).mean()


class Statistics(nn.Module):
    """Reads what batch norm is about to change, by hand or as batch norm does in evaluation."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE)
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        if self.by_hand:
            read = (made - self.norm.running_mean) * 2
        else:
            self.norm.eval()
            read = self.norm(made)
            self.norm.train()
        return torch.sigmoid(self.last(torch.sigmoid(torch.tanh(read)) * torch.tanh(self.norm(made)))).mean()


class Switched(nn.Module):
    """Has convolutions computed without oneDNN, whose bits differ."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        torch.backends.mkldnn.set_flags(False)
        made = self.layers(x[:32].view(-1, 1, 4, 8).repeat(1, 1, 2, 1))
        torch.backends.mkldnn.set_flags(True)
        return torch.sigmoid(made).mean()


PROGRAMS: dict[str, Callable[[], nn.Module]] = {
    "other data": lambda: Codebook(_give_other_data, 1),
    "other data now and then": lambda: Codebook(_give_other_data, 3),
    "other data that is written": lambda: Codebook(_give_other_data_and_write, 1),
    "written data": lambda: Codebook(_write_data, 1),
    "written data now and then": lambda: Codebook(_write_data, 3),
    "written": lambda: Codebook(_write, 1),
    "written now and then": lambda: Codebook(_write, 3),
    "embedding": Renormed,
    "statistics by hand": lambda: Statistics(by_hand=True),
    "statistics in evaluation": lambda: Statistics(by_hand=False),
    "switches": Switched,
}


def _trained(make: Callable[[], nn.Module], **options: object) -> list[Tensor]:
    torch.manual_seed(0)
    model = make()
    if options:
        torchecho.optimize(model, engine="eager", strict=True, **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 10.0)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(ROWS, SIZE)).backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return [*found, *(t.clone() for t in model.state_dict().values())]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_changes_in_the_forward_changes_no_bit(name: str, options: dict[str, object]) -> None:
    expected, found = _trained(PROGRAMS[name]), _trained(PROGRAMS[name], **options)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


class ActorCritic(nn.Module):
    """Has two heads, one of which is trained on what the other has left."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.critic, self.actor = (nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.tanh(self.shared(x))
        return self.critic(made), self.actor(made.detach())


def _trained_in_turns(**options: object) -> list[Tensor]:
    torch.manual_seed(0)
    model = ActorCritic()
    if options:
        torchecho.optimize(model, engine="eager", strict=True, **options)
    of_critic = torch.optim.SGD([*model.shared.parameters(), *model.critic.parameters()], 0.1)
    of_actor = torch.optim.SGD(model.actor.parameters(), 0.1)
    for _ in range(STEPS):
        value, choice = model(torch.randn(ROWS, SIZE))
        for loss, optimizer in ((torch.sigmoid(value).mean(), of_critic), (F.softplus(choice).mean(), of_actor)):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_optimizer_may_step_between_two_backwards_of_one_forward(options: dict[str, object]) -> None:
    expected, found = _trained_in_turns(), _trained_in_turns(**options)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_nothing_is_watched_once_no_other_backward_can_come() -> None:
    torch.manual_seed(0)
    model = torchecho.optimize(ActorCritic(), engine="eager", strict=True, max_slowdown=20.0)
    for step in range(STEPS):
        value, choice = model(torch.randn(ROWS, SIZE))
        torch.sigmoid(value).mean().backward()
        if step < STEPS - 1:
            F.softplus(choice).mean().backward()
            assert scope.num_modes() == 0
    assert scope.num_modes() == 1  # the optimizer that steps now would change what `choice` is made of
    del choice
    assert scope.num_modes() == 0
    assert boundaries.listener() is None
