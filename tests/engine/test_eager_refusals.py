"""Where steps cannot be watched, or not planned as asked: the program runs on as it is, with one warning."""

import contextlib
import threading
import warnings
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
    assert_same,
    at_floor,
    batch,
    gradients,
    network,
    run,
    untouched,
)


class Transformed(nn.Module):
    """Uses something in the middle of its forward."""

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.use = network(2), network(2), use

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.use(self.first(x))).pow(2).mean()


def _without_hooks(x: Tensor) -> Tensor:
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        return torch.sin(x) * x


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "grad": lambda x: torch.func.grad(lambda y: y.sin().sum())(x.detach()) * x,
    "jacobian": lambda x: torch.func.jacrev(lambda y: y.tanh())(x[0]) @ x.t(),
    "no hooks": _without_hooks,
}


def _optimized(model: nn.Module) -> nn.Module:
    return torchecho.optimize(model, max_slowdown=100.0, cost="roofline")


@pytest.mark.parametrize("use", USES)
def test_forward_that_allows_no_hooks_runs_untouched_with_one_warning(use: str) -> None:
    def scenario(prepare: Prepare) -> list[Tensor | None]:
        model = Transformed(USES[use])
        if use == "jacobian":
            model.second = nn.Identity()
        prepare(model)
        found = []
        for _ in range(STEPS):
            loss = model(batch())
            loss.backward()
            found += [loss, *gradients(model)]
        return found

    expected = run(scenario, untouched)
    with pytest.warns(torchecho.EchoWarning, match="runs untouched: .*saved-tensor hooks") as told:
        found = run(scenario, _optimized)
    assert len(told) == 1
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert_clean()


def test_vmap_is_seen_through() -> None:
    def scenario(prepare: Prepare) -> list[Tensor | None]:
        rows = torch.func.vmap(lambda row: torch.sin(torch.tanh(row)) * row.sum())
        model, found = prepare(Transformed(rows)), []
        for _ in range(STEPS):
            loss = model(batch())
            loss.backward()
            found += [loss, *gradients(model)]
        return found

    assert_same(scenario)


def test_transform_in_some_step_only_ends_the_planning() -> None:
    def use(x: Tensor) -> Tensor:
        return torch.sin(x) if len(seen) < STEPS else USES["grad"](x)

    seen: list[Tensor] = []
    model = _optimized(Transformed(use))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2 * STEPS):
            seen.append(model(batch()))
            seen[-1].backward()
            gradients(model)
    (message,) = [str(one.message) for one in told if one.category is torchecho.EchoWarning]
    assert message.startswith("torchecho: Transformed runs untouched: what it calls disables saved-tensor hooks")
    assert_clean()


def test_strict_models_raise_where_hooks_are_refused() -> None:
    model = at_floor(Transformed(USES["grad"]))
    with pytest.raises(torchecho.EchoError, match=r"Transformed cannot be optimized: .*saved-tensor hooks"):
        model(batch())
    assert_clean()


def test_model_inside_a_transform() -> None:
    model = network(2)
    x, expected = batch(), None
    for prepare in (untouched, _optimized):
        prepare(model)
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def loss(values: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(model, values, (x,)).pow(2).mean()

        with pytest.warns(torchecho.EchoWarning, match="saved-tensor hooks") if expected else contextlib.nullcontext():
            found = torch.func.grad(loss)(parameters)
            torch.func.grad(loss)(parameters)
        expected = expected or found
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert_clean()


@pytest.mark.filterwarnings("error::torchecho.EchoWarning")
@pytest.mark.parametrize("use", ["grad", "no hooks"])
def test_warning_made_an_error_where_hooks_are_refused(use: str) -> None:
    model = _optimized(Transformed(USES[use]))
    with pytest.raises(torchecho.EchoWarning):
        model(batch())
    assert_clean()
    model(batch()).backward()
    assert_clean()


@pytest.mark.filterwarnings("error::torchecho.EchoWarning")
def test_warning_made_an_error_where_planning_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchecho.engine.draft.build_graph", lambda *_, **__: 1 / 0)
    model = _optimized(network(2))
    with pytest.raises(torchecho.EchoWarning, match="ZeroDivisionError"):
        model(batch()).sum().backward()
    assert_clean()
    found = gradients(model)
    assert all(grad is not None for grad in found)
    model(batch()).sum().backward()
    assert_clean()


@pytest.mark.filterwarnings("error::torchecho.EchoWarning")
def test_warning_made_an_error_where_the_budget_is_missed() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.extra = nn.Linear(SIZE, SIZE), 0

        def forward(self, x: Tensor) -> Tensor:
            held = [torch.ones(1000) for _ in range(self.extra)]
            return torch.tanh(self.layer(x)).sum() + len(held)

    model, x = Growing(), batch()
    budget = torchecho.plan(model, x, max_slowdown=0.0, cost="roofline", engine="eager").baseline_peak_bytes + 100
    torchecho.optimize(model, memory_budget=budget, cost="roofline")
    model(x).backward()
    model.zero_grad()
    model.extra = 1000  # what no plan has foreseen
    with pytest.raises(torchecho.EchoWarning, match="is over the budget"):
        model(x).backward()
    assert_clean()
    assert all(grad is not None for grad in gradients(model))
    model(x).backward()
    assert_clean()


class Attending(nn.Module):
    """Attention whose dropout changes from step to step, at the same places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = network(2), network(2)
        self.dropout = 0.0

    def forward(self, x: Tensor) -> Tensor:
        q = torch.tanh(self.first(x)).view(1, 4, 16, SIZE)
        made = nn.functional.scaled_dot_product_attention(q, q * 2, torch.sin(q), dropout_p=self.dropout)
        made = nn.functional.dropout(made.view(64, SIZE), self.dropout, training=self.dropout > 0)
        return self.second(torch.tanh(made) * made).pow(2).mean()


@pytest.mark.parametrize("probabilities", [(0.0, 0.0, 0.5, 0.5, 0.0), (0.5, 0.5, 0.0, 0.5)])
def test_draws_are_not_made_again_where_the_probability_changes(probabilities: tuple[float, ...]) -> None:
    def scenario(prepare: Prepare) -> list[Tensor | None]:
        model, found = prepare(Attending()), []
        for probability in probabilities:
            model.dropout = probability
            loss = model(batch())
            loss.backward()
            found += [loss, *gradients(model), torch.get_rng_state()]
        return found

    expected, found = run(scenario, untouched), run(scenario, at_floor)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert torchecho.plans()[-1].num_recomputed


def test_thread_that_ends_with_its_graph_alive() -> None:
    """The graph that the thread leaves behind is differentiated by another."""
    model, losses = at_floor(network()), []
    torch.manual_seed(0)
    x = batch()

    def forward() -> None:
        losses.append(model(x).pow(2).mean())

    for _ in range(STEPS):
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
        assert_clean()
        losses.pop().backward()
        found = gradients(model)
        assert_clean()
        torchecho.disable(model)(x).pow(2).mean().backward()
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), found, strict=True))
        at_floor(model)
        model(x).pow(2).mean().backward()
        gradients(model)


def _gan_steps(prepare: Prepare, num_steps: int = STEPS) -> Iterator[Tensor | None]:
    generator, critic = prepare(network(3)), prepare(network(3))
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (generator, critic)]
    for _ in range(num_steps):
        fake = generator(batch())
        loss = critic(batch()).pow(2).mean() - critic(fake.detach()).pow(2).mean()
        loss.backward()
        optimizers[1].step()
        yield loss
        yield from gradients(critic)
        loss = critic(fake).pow(2).mean()
        loss.backward()
        optimizers[0].step()
        yield loss
        yield from gradients(generator, critic)


def _under(budget: int) -> Prepare:
    return lambda model: torchecho.optimize(model, memory_budget=budget, cost="roofline", strict=True)


@pytest.mark.filterwarnings("ignore:.*over the budget:torchecho.EchoWarning")
@pytest.mark.parametrize("share", [0.6, 0.9])
def test_gan_under_a_budget_in_bytes(share: float) -> None:
    count = len(torchecho.plans())
    expected = run(lambda prepare: list(_gan_steps(prepare)), untouched)
    run(lambda prepare: list(_gan_steps(prepare)), at_floor)
    baseline = max(plan.baseline_peak_bytes for plan in torchecho.plans()[count:])
    found = run(lambda prepare: list(_gan_steps(prepare)), _under(int(share * baseline)))
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert_clean()


def test_two_losses_keep_to_a_budget_that_needs_both_forwards_recomputed() -> None:
    def scenario(prepare: Prepare) -> list[Tensor | None]:
        model, found = prepare(network()), []
        for _ in range(STEPS):
            x = batch()
            first, second = model(x).pow(2).mean(), model(x.flip(0)).pow(2).mean()
            first.backward()
            second.backward()
            found += [first, second, *gradients(model)]
        return found

    expected, count = run(scenario, untouched), len(torchecho.plans())
    run(scenario, at_floor)
    floor = torchecho.plans()[count]
    assert floor.floor_bytes < 0.8 * floor.baseline_peak_bytes
    budget = (floor.floor_bytes + floor.baseline_peak_bytes) // 2
    found = run(scenario, _under(budget))
    assert torchecho.plans()[-1].measured_peak_bytes <= budget
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert_clean()
