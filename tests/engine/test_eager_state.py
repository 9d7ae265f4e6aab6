"""What is left behind when a step does not go to its end, or is not alone: nothing, and the next step is right."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import torchecho
from tests.engine.eager_steps import (
    SIZE,
    STEPS,
    Prepare,
    assert_clean,
    at_floor,
    batch,
    gradients,
    network,
    untouched,
)


class Fragile(nn.Module):
    """Raises what it is told to, in the middle of its forward or of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = network(2), network(2)
        self.in_forward: BaseException | None = None
        self.in_backward: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.in_forward is not None:
            raise self.in_forward
        if x.requires_grad:
            x.register_hook(self._raise)
        return self.second(x).pow(2).mean()

    def _raise(self, grad: Tensor) -> None:
        if self.in_backward is not None:
            raise self.in_backward


def _step(model: nn.Module, seed: int) -> list[Tensor | None]:
    torch.manual_seed(seed)
    loss = model(batch())
    loss.backward()
    return [loss.detach(), *gradients(model)]


def _assert_right(model: nn.Module, seed: int = 7) -> None:
    """Check that a step of an optimized model gives the bits of plain PyTorch and leaves no trace."""
    found = _step(model, seed)
    assert_clean()
    expected = _step(torchecho.disable(model), seed)
    for a, b in zip(expected, found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("steps_before", range(STEPS))
@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["in_forward", "in_backward"])
def test_error_in_the_program(where: str, error: BaseException, steps_before: int) -> None:
    model = at_floor(Fragile())
    for seed in range(steps_before):
        _step(model, seed)
    setattr(model, where, error)
    with pytest.raises(type(error)):
        _step(model, 9)
    setattr(model, where, None)
    assert_clean()
    gradients(model)
    _assert_right(model)


@pytest.mark.parametrize("where", ["in_forward", "in_backward"])
def test_interrupt_in_a_first_step_under_a_budget(where: str) -> None:
    """The step that runs in little memory before there is a plan."""
    model = torchecho.optimize(Fragile(), memory_budget="1GiB", cost="roofline", strict=True)
    setattr(model, where, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        _step(model, 9)
    setattr(model, where, None)
    assert_clean()
    gradients(model)
    count = len(torchecho.plans())
    _step(model, 1)
    assert len(torchecho.plans()) == count + 1
    _assert_right(model)


def test_interrupted_planning_is_done_after_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    model = at_floor(Fragile())
    with monkeypatch.context() as patch:
        patch.setattr("torchecho.engine.draft.price", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _step(model, 0)
    assert_clean()
    gradients(model)
    count = len(torchecho.plans())
    _step(model, 1)
    assert len(torchecho.plans()) == count + 1
    _assert_right(model)


@pytest.mark.parametrize("steps_before", range(STEPS))
def test_loss_that_nobody_differentiates(steps_before: int) -> None:
    model = at_floor(Fragile())
    for seed in range(steps_before):
        _step(model, seed)
    loss = model(batch())
    del loss
    assert_clean()
    _assert_right(model)


@pytest.mark.parametrize("steps_before", range(STEPS))
def test_generator_left_half_way(steps_before: int) -> None:
    def training(model: nn.Module) -> Iterator[None]:
        for seed in range(10):
            torch.manual_seed(seed)
            loss = model(batch())
            yield
            loss.backward()
            gradients(model)

    model = at_floor(Fragile())
    steps = training(model)
    for _ in range(steps_before + 1):
        next(steps)
    steps.close()
    del steps
    assert_clean()
    _assert_right(model)


def test_forward_that_is_a_generator() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = network(2), network(2)

        def forward(self, x: Tensor) -> Iterator[Tensor]:
            x = self.first(x)
            yield x
            yield self.second(x)

    def steps(prepare: Prepare) -> list[Tensor | None]:
        torch.manual_seed(0)
        model, found = prepare(Lazy()), []
        for _ in range(STEPS):
            made = list(model(batch()))
            made[-1].pow(2).mean().backward()
            found += gradients(model)
        next(iter(model(batch())))
        return found

    expected, found = steps(untouched), steps(at_floor)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def _in_threads(work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - the test fails by it
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_two_threads_train_a_model_each() -> None:
    torch.manual_seed(0)
    plain = [network(3), network(4)]
    optimized = [network(3), network(4)]
    for a, b in zip(plain, optimized, strict=True):
        b.load_state_dict(a.state_dict())
        at_floor(b)
    batches = [[batch() for _ in range(6)] for _ in range(2)]
    found: dict[tuple[int, bool], list[Tensor | None]] = {}

    def train(number: int, models: list[nn.Module]) -> None:
        kept = []
        for x in batches[number]:
            models[number](x).pow(2).mean().backward()
            kept += gradients(models[number])
        found[number, models is plain] = kept

    _in_threads(lambda number: train(number, plain))
    _in_threads(lambda number: train(number, optimized))
    for number in range(2):
        assert all(torch.equal(a, b) for a, b in zip(found[number, True], found[number, False], strict=True))
    assert_clean()


def test_thread_that_ends_before_its_backward() -> None:
    model = at_floor(Fragile())
    _in_threads(lambda number: model(batch()) and None)
    assert_clean()
    _assert_right(model)


def test_second_model_in_the_process() -> None:
    models = [at_floor(Fragile()), at_floor(Fragile())]
    for seed in range(STEPS):
        for model in models:
            _step(model, seed)
    loss = models[0](batch())
    torch.manual_seed(3)
    other = models[1](batch())
    other.backward()
    loss.backward()
    gradients(*models)
    assert_clean()
    for model in models:
        _assert_right(model)


def test_loss_is_kept_from_step_to_step() -> None:
    """A program that keeps the last loss, with its graph, while the next step runs."""
    model = at_floor(network())
    torch.manual_seed(0)
    batches = [batch() for _ in range(5)]

    def train() -> list[Tensor | None]:
        found, loss = [], None
        for x in batches:
            loss = model(x).pow(2).mean()
            loss.backward()
            found += [loss.detach(), *gradients(model)]
        del loss
        return found

    found = train()
    assert_clean()
    torchecho.disable(model)
    assert all(torch.equal(a, b) for a, b in zip(train(), found, strict=True))


def test_inputs_that_need_gradients() -> None:
    model = at_floor(network())
    x = torch.randn(64, SIZE, requires_grad=True)
    for _ in range(STEPS):
        model(x).pow(2).mean().backward()
    found, x.grad = x.grad, None
    assert_clean()
    torchecho.disable(model)
    for _ in range(STEPS):
        model(x).pow(2).mean().backward()
    assert torch.equal(found, x.grad)
