"""What a forward reads and something changes before the backward: the same bits, and no error that PyTorch has not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


class UpdatedStatistics(nn.Module):
    """Updates running statistics itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.register_buffer("mean", torch.zeros(SIZE))
        self.register_buffer("variance", torch.ones(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        mean, variance = torch.batch_norm_update_stats(made.detach(), self.mean, self.variance, 0.1)
        return torch.sigmoid(self.last(torch.tanh(made * mean) * (variance + 1).rsqrt())).mean()


class LaterStatistics(nn.Module):
    """Reads in later steps what batch norm is about to change, and something else at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.norms = nn.ModuleList([nn.BatchNorm1d(SIZE), nn.BatchNorm1d(SIZE)])
        self.num_steps = 0

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        read = torch.tanh((made - self.norms[int(self.num_steps < STEPS - 1)].running_mean) * 2)
        self.num_steps += 1
        return torch.sigmoid(self.last(torch.sigmoid(read) * self.norms[0](made))).mean()


class ManyReaders(nn.Module):
    """Reads one value in very many steps of a loop, and then changes what it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.full((4, 4), 0.01)
        weight, state = self.weight + noise, x[:1, :4]
        for _ in range(1100):
            state = torch.tanh(state @ weight + 0.1)
        noise.zero_()
        return state.mean()


class Switching(torch.autograd.Function):
    """Asks for what it saved while oneDNN is off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        torch.backends.mkldnn.set_flags(False)
        (x,) = ctx.saved_tensors
        torch.backends.mkldnn.set_flags(True)
        return grad * torch.cos(x)


class SwitchedInTheBackward(nn.Module):
    """Has convolutions made again while the backward has switched oneDNN off."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(Switching.apply(self.layers(x[:32].view(-1, 1, 4, 8).repeat(1, 1, 2, 1)))).mean()


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
    "statistics updated by the program": UpdatedStatistics,
    "statistics read in later steps": LaterStatistics,
    "many readers": ManyReaders,
    "switches": Switched,
    "switches in the backward": SwitchedInTheBackward,
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


class Held(nn.Module):
    """Returns what autograd has not saved, but something of it was."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(SIZE)), nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = x + self.bias
        return made, torch.sin(torch.sigmoid(made) * self.weight).mean(), torch.tanh(made).mean()


def _clear_data(made: Tensor) -> None:
    made.data.zero_()


@torch.no_grad()
def _clear(made: Tensor) -> None:
    made.zero_()


@pytest.mark.parametrize("clear", [_clear_data, _clear])
@pytest.mark.parametrize("keeps_graph", [False, True], ids=["two losses", "one graph twice"])
def test_what_the_program_holds_may_change_between_two_backwards(
    clear: Callable[[Tensor], None], keeps_graph: bool
) -> None:
    """In the first step under a budget in bytes what the program holds is not made again."""
    found = []
    for options in ({}, {"memory_budget": "2MiB"}):
        torch.manual_seed(0)
        model, x = Held(), torch.randn(ROWS, SIZE)
        if options:
            torchecho.optimize(model, engine="eager", strict=True, **options)
        made, first, second = model(x)
        first.backward(retain_graph=keeps_graph)
        clear(made)
        (first if keeps_graph else second).backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_frozen_parameter_that_was_saved_is_given_other_data() -> None:
    """Autograd keeps the parameter itself, and reads what it has then."""
    found = []
    for options in ({}, {"max_slowdown": 20.0}):
        torch.manual_seed(0)
        layer, scale = nn.Linear(SIZE, SIZE), nn.Parameter(torch.randn(SIZE), requires_grad=False)
        model = nn.Sequential(layer)
        if options:
            torchecho.optimize(model, engine="eager", strict=True, **options)
        for _ in range(STEPS):
            loss = torch.sigmoid(torch.tanh(model(torch.randn(ROWS, SIZE)) * scale)).mean()
            scale.data = scale.data * 0.9
            loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@dataclass
class Output:
    """What a model returns that has names for it."""

    made: Tensor


class Named(nn.Module):
    """Returns an object of the program's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE))

    def forward(self, x: Tensor) -> Output:
        return Output(self.layers(x))


def test_a_model_that_returns_an_object_of_the_programs_own_is_planned() -> None:
    model = torchecho.optimize(Named(), engine="eager", strict=True, memory_budget=1000)
    with pytest.raises(torchecho.BudgetError):
        torch.sigmoid(model(torch.randn(ROWS, SIZE)).made).mean().backward()
