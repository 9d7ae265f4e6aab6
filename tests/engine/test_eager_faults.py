"""Where recomputation goes wrong, one test a fault: each step must give the bits of plain PyTorch."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.flop_counter import FlopCounterMode

import torchecho
from tests.engine.eager_steps import (
    GRAD,
    SIZE,
    STEPS,
    Prepare,
    assert_clean,
    assert_same,
    at_floor,
    batch,
    gradients,
    network,
)
from torchecho.errors import RecomputeError


def test_graph_is_used_twice() -> None:
    def scenario(prepare: Prepare) -> list[Tensor | None]:
        model, found = prepare(network()), []
        for _ in range(STEPS):
            loss = model(batch()).pow(2).mean()
            loss.backward(retain_graph=True)
            loss.backward()
            found += [loss, *gradients(model)]
        return found

    assert_same(scenario)


def test_double_backward() -> None:
    def scenario(prepare: Prepare) -> list[Tensor | None]:
        model, found = prepare(network()), []
        for _ in range(STEPS):
            x = batch().requires_grad_()
            loss = model(x).pow(2).mean()
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + grad.pow(2).sum()).backward()
            found += [loss, grad, x.grad, *gradients(model)]
        return found

    # What the gradient's own graph saves is alive to the end: nothing of it is worth making again.
    assert_same(scenario, recomputes=False)


def test_gradients_of_some_inputs() -> None:
    def scenario(prepare: Prepare) -> list[Tensor | None]:
        model, found = prepare(network()), []
        for _ in range(STEPS):
            loss = model(batch()).pow(2).mean()
            found += torch.autograd.grad(loss, list(model[3].parameters()))
        return found

    assert_same(scenario)


def test_gradients_in_two_halves_of_one_graph() -> None:
    """The second loss shares a value that the first one's backward has made again."""

    def scenario(prepare: Prepare) -> list[Tensor | None]:
        class Heads(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body, self.first, self.second = network(2), network(2), network(2)

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                shared = torch.tanh(self.body(x).detach())
                return self.first(shared).mean(), self.second(torch.sin(shared) * shared).mean()

        model, found = prepare(Heads()), []
        for _ in range(STEPS):
            first, second = model(batch())
            first.backward()
            second.backward()
            found += [first, second, *gradients(model)]
        return found

    assert_same(scenario)


def test_gan_with_two_losses() -> None:
    def scenario(prepare: Prepare) -> list[Tensor | None]:
        generator, critic, found = prepare(network(2)), prepare(network(3)), []
        for _ in range(STEPS):
            fake = generator(batch())
            (critic(batch()).mean() - critic(fake.detach()).mean()).backward()
            found += gradients(critic)
            loss = critic(fake).mean()
            loss.backward()
            found += [loss, *gradients(generator, critic)]
        return found

    assert_same(scenario)


def test_two_models_in_one_loss() -> None:
    def scenario(prepare: Prepare) -> list[Tensor | None]:
        first, second, found = prepare(network(2)), prepare(network(3)), []
        for _ in range(STEPS):
            x = batch()
            loss = (first(x) * second(x)).mean()
            loss.backward()
            found += [loss, *gradients(first, second)]
        return found

    assert_same(scenario)


def test_module_is_called_twice() -> None:
    def scenario(prepare: Prepare) -> list[Tensor | None]:
        model, found = prepare(network()), []
        for _ in range(STEPS):
            loss = model(model(batch())).mean()
            loss.backward()
            found += [loss, *gradients(model)]
        return found

    assert_same(scenario)


def test_gradients_add_up() -> None:
    def scenario(prepare: Prepare) -> list[Tensor | None]:
        model, found = prepare(network()), []
        for _ in range(STEPS):
            for _ in range(3):
                model(batch()).pow(2).mean().backward()
            found += gradients(model)
        return found

    assert_same(scenario)


def test_state_is_carried_and_cut() -> None:
    def scenario(prepare: Prepare) -> list[Tensor | None]:
        class Carrying(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.cell, self.out = nn.GRUCell(SIZE, SIZE), network(2)
                self.state = torch.zeros(64, SIZE)

            def forward(self, x: Tensor) -> Tensor:
                state = self.state.detach()
                for _ in range(5):
                    state = self.cell(x, state)
                self.state = state
                return self.out(state).pow(2).mean()

        model, found = prepare(Carrying()), []
        for _ in range(STEPS):
            loss = model(batch())
            loss.backward()
            found += [loss, model.state, *gradients(model)]
        return found

    assert_same(scenario)


def test_packed_sequences_of_other_lengths() -> None:
    def scenario(prepare: Prepare) -> list[Tensor | None]:
        class Reader(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lstm, self.out = nn.LSTM(SIZE, SIZE, num_layers=2), network(2)

            def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
                made, _ = self.lstm(pack_padded_sequence(x, lengths, enforce_sorted=False))
                return self.out(pad_packed_sequence(made)[0]).pow(2).mean()

        model, found = prepare(Reader()), []
        for lengths in ([9, 4, 7, 1], [9, 4, 7, 1], [5, 5, 2, 3], [11, 12, 1, 1]):
            loss = model(torch.randn(max(lengths), 4, SIZE), torch.tensor(lengths))
            loss.backward()
            found += [loss, *gradients(model)]
        return found

    assert_same(scenario)


@pytest.mark.parametrize("step", range(STEPS))
def test_parameter_changed_between_forward_and_backward_raises(step: int) -> None:
    model = at_floor(network())
    for _ in range(step):
        model(batch()).pow(2).mean().backward()
    loss = model(batch()).pow(2).mean()
    with torch.no_grad():
        model[3].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"in ?place"):
        loss.backward()
    assert_clean()
    model.zero_grad()
    model(batch()).pow(2).mean().backward()
    assert_clean()


@pytest.mark.parametrize("step", range(STEPS))
def test_input_changed_between_forward_and_backward_raises(step: int) -> None:
    model = at_floor(network())
    for _ in range(step):
        model(batch()).pow(2).mean().backward()
    x = batch()
    loss = model(x).pow(2).mean()
    x.add_(1.0)
    with pytest.raises(RecomputeError, match=r"in ?place"):
        loss.backward()
    assert_clean()


def test_tensor_and_module_hooks_fire_once_in_order() -> None:
    fired: list[str] = []

    def scenario(prepare: Prepare) -> list[Tensor | None]:
        model, found = network(), []
        model[3].register_full_backward_hook(lambda *_: fired.append("module"))
        model[6].weight.register_hook(lambda grad: fired.append("gradient") or grad * 0.5)
        model[6].weight.register_post_accumulate_grad_hook(lambda _: fired.append("accumulated"))
        prepare(model)
        for _ in range(STEPS):
            y = model(batch())
            y.register_hook(lambda grad: fired.append("output") or grad * 2)
            y.mean().backward()
            found += gradients(model)
        return found

    assert_same(scenario)
    assert fired == ["output", "gradient", "accumulated", "module"] * (2 * STEPS)


def test_saved_tensors_that_a_hook_looks_at() -> None:
    """A user's hook reads what a node saved, before the node itself does."""

    def scenario(prepare: Prepare) -> list[Tensor | None]:
        model, found = prepare(network()), []
        for _ in range(STEPS):
            hidden = torch.tanh(model(batch()))
            node = hidden.grad_fn
            node.register_prehook(lambda _, node=node, found=found: found.append(node._saved_result.clone()))
            hidden.mean().backward()
            found += gradients(model)
        return found

    assert_same(scenario)


def test_frozen_parameters() -> None:
    def scenario(prepare: Prepare) -> list[Tensor | None]:
        model, found = network(), []
        model[:6].requires_grad_(False)
        prepare(model)
        for _ in range(STEPS):
            model(batch()).pow(2).mean().backward()
            found += gradients(model)
        return found

    assert_same(scenario)


def test_inference_tensors_among_the_inputs() -> None:
    def scenario(prepare: Prepare) -> list[Tensor | None]:
        class Adding(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = network()

            def forward(self, x: Tensor, offset: Tensor) -> Tensor:
                return self.body(torch.tanh(x) + offset).pow(2).mean()

        model, found = prepare(Adding()), []
        for _ in range(STEPS):
            with torch.inference_mode():
                offset = batch() * 2
            model(batch().requires_grad_(), offset).backward()
            found += gradients(model)
        return found

    assert_same(scenario)


def test_calls_without_gradients_between() -> None:
    def scenario(prepare: Prepare) -> list[Tensor | None]:
        model, found = network(), []
        model.append(nn.BatchNorm1d(SIZE))
        prepare(model)
        for _ in range(STEPS):
            loss = model(batch()).pow(2).mean()
            model.eval()
            with torch.no_grad():
                found.append(model(batch()))
            model.train()
            loss.backward()
            with torch.no_grad():
                found.append(model(batch()))
            found += [loss, *gradients(model), *model.buffers()]
        return found

    assert_same(scenario)


def test_nested_optimized_modules() -> None:
    def scenario(prepare: Prepare) -> list[Tensor | None]:
        model, found = network(), []
        model.append(prepare(network(2)))
        prepare(model)
        for _ in range(STEPS):
            model(batch()).pow(2).mean().backward()
            found += gradients(model)
        return found

    assert_same(scenario)


def test_inside_another_dispatch_mode() -> None:
    def scenario(prepare: Prepare) -> list[Tensor | None]:
        model, found = prepare(network()), []
        for step in range(STEPS):
            if step == 1:
                with FlopCounterMode(display=False) as counter:
                    model(batch()).pow(2).mean().backward()
                assert counter.get_total_flops() >= 4 * 2 * 64 * SIZE * SIZE
            else:
                model(batch()).pow(2).mean().backward()
            found += gradients(model)
        return found

    assert_same(scenario)


def test_gradient_penalty_inside_the_forward() -> None:
    def scenario(prepare: Prepare) -> list[Tensor | None]:
        class Penalised(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = network()

            def forward(self, x: Tensor) -> Tensor:
                x = x.clone().requires_grad_()
                made = self.body(x)
                (grad,) = torch.autograd.grad(made.sum(), x, create_graph=True)
                return made.mean() + torch.tanh(grad).pow(2).sum()

        model, found = prepare(Penalised()), []
        for _ in range(STEPS):
            loss = model(batch())
            loss.backward()
            found += [loss, *gradients(model)]
        return found

    assert_same(scenario)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo hides it, except where warnings are errors
def test_compiled_part_inside() -> None:
    def scenario(prepare: Prepare) -> list[Tensor | None]:
        model, found = network(), []
        model[1].compile(backend="aot_eager")
        prepare(model)
        for _ in range(STEPS):
            model(batch()).pow(2).mean().backward()
            found += gradients(model)
        return found

    assert_same(scenario)


def test_copies_pickles_and_state_are_those_of_the_plain_model() -> None:
    model = network()
    names = list(model.state_dict())
    at_floor(model)
    for _ in range(STEPS):
        model(batch()).mean().backward()
    assert list(model.state_dict()) == names
    x = batch()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is nn.Sequential
        assert torch.equal(twin(x), model(x))
        twin.zero_grad()
        model.zero_grad()
        twin(x).mean().backward()
        model(x).mean().backward()
        for a, b in zip(twin.parameters(), model.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    assert_clean()


def test_disable_takes_the_engine_away() -> None:
    model = at_floor(network())
    for _ in range(STEPS):
        model(batch()).mean().backward()
    torchecho.disable(model)
    y = model(batch())
    assert_clean()
    assert y.grad_fn.metadata == {}
    y.mean().backward()
    assert_clean()


def test_backward_that_is_not_announced() -> None:
    """A program may have bound torch's functions before anybody listened."""

    def scenario(prepare: Prepare) -> list[Tensor | None]:
        model, found = prepare(network()), []
        for step in range(2 * STEPS):
            loss = model(batch()).pow(2).mean()
            if step % 2:
                found += GRAD(loss, list(model.parameters()))
            else:
                loss.backward()
            found += [loss, *gradients(model)]
        return found

    assert_same(scenario)


def test_gradient_penalty_inside_the_second_call_of_a_step() -> None:
    """The backward inside the second forward is not the one that ends the step."""

    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network()

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            made = self.body(x)
            (grad,) = torch.autograd.grad(made.sum(), x, create_graph=True)
            return made.mean() + torch.tanh(grad).pow(2).sum()

    def scenario(prepare: Prepare) -> list[Tensor | None]:
        model, found = prepare(Penalised()), []
        for _ in range(STEPS):
            loss = model(batch()) + model(batch())
            loss.backward()
            found += [loss, *gradients(model)]
        return found

    assert_same(scenario)
    plan = torchecho.plans()[-1]
    assert plan.measured_peak_bytes <= plan.predicted_peak_bytes
