"""The calls of the public interface, besides what tests/end_to_end shows of the doors."""

import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config

import torchecho
import torchecho.planner
from tests.end_to_end.models import Loss
from torchecho import errors

EAGER = {"lowering": "eager", "cost": "roofline", "strict": True}


class Scaled(nn.Module):
    """A layer with a switch and a keyword argument; the default takes the shorter way."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, *, twice: bool = False, scale: Tensor | None = None) -> Tensor:
        """Map (B, width) to a loss."""
        x = torch.tanh(self.linear(x))
        x = torch.tanh(self.linear(x)) if twice else x
        return (x if scale is None else x * scale).sum()


def test_plans_are_in_the_order_in_which_they_were_made() -> None:
    before = len(torchecho.plans())
    for width in (8, 4, 6):
        model = torchecho.optimize(Scaled(width), max_slowdown=0.0, **EAGER)
        model(torch.randn(2, width)).backward()
    eight, four, six = (plan.baseline_peak_bytes for plan in torchecho.plans()[before:])
    assert four < six < eight  # a wider layer needs more


def test_the_list_of_plans_is_the_callers_own() -> None:
    model = torchecho.optimize(Scaled(), max_slowdown=0.0, **EAGER)
    model(torch.randn(2, 8)).backward()
    listed = torchecho.plans()
    listed.clear()
    assert torchecho.plans()


def test_more_models_of_a_class_than_dynamo_would_compile_are_all_planned() -> None:
    before = len(torchecho.plans())
    with dynamo_config.patch(recompile_limit=1, accumulated_recompile_limit=1):
        for _ in range(3):
            model = torchecho.optimize(Scaled(), max_slowdown=0.0, **EAGER)
            model(torch.randn(2, 8)).backward()
    assert len(torchecho.plans()) == before + 3


@pytest.mark.parametrize(
    ("model", "path"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh())), "1.0"),
        (nn.Linear(8, 8), ""),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), "linear2"),
    ],
)
def test_models_that_are_a_class_of_torch_itself_are_planned(model: nn.Module, path: str) -> None:
    before, x = len(torchecho.plans()), torch.randn(2, 4, 8)
    model.eval()  # no dropout, so that plain PyTorch can be compared with
    model.register_forward_hook(lambda _, __, made: made * 3)
    expected = model(x)
    torchecho.optimize(model, max_slowdown=0.0, **EAGER)
    for _ in range(2):
        made = model(x)
        made.sum().backward()
    torch.testing.assert_close(made, expected)
    assert len(torchecho.plans()) == before + 1
    rows = torchecho.plans()[-1].stashed + torchecho.plans()[-1].at_peak
    assert not any(row.source.startswith("api.py") for row in rows)
    assert path in {row.module for row in rows}


def test_plan_takes_keyword_arguments() -> None:
    model, x = Scaled(), torch.randn(16, 8)
    plain = torchecho.plan(model, (x,), max_slowdown=0.0, cost="roofline")
    longer = torchecho.plan(model, (x,), {"twice": True}, max_slowdown=0.0, cost="roofline")
    scaled = torchecho.plan(model, (x,), {"scale": torch.ones(16, 8)}, max_slowdown=0.0, cost="roofline")
    # one more tanh of 16 x 8 numbers is stashed; and the scale of as many lies there throughout
    assert longer.baseline_stash_bytes - plain.baseline_stash_bytes == 4 * 128
    assert scaled.num_ops > plain.num_ops
    only_keywords = torchecho.plan(model, example_kwargs={"x": x, "twice": True}, max_slowdown=0.0, cost="roofline")
    assert only_keywords.graph_hash == longer.graph_hash


def test_plan_takes_one_tensor_as_it_is() -> None:
    model, x = Scaled(), torch.randn(16, 8)
    options = {"max_slowdown": 0.0, "cost": "roofline"}
    assert torchecho.plan(model, x, **options).graph_hash == torchecho.plan(model, (x,), **options).graph_hash


def test_plan_leaves_the_model_and_the_random_numbers_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    torchecho.plan(model, torch.randn(4, 8, generator=torch.Generator()), max_slowdown=0.0, cost="roofline")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert type(next(model.parameters())) is nn.Parameter


def test_plan_runs_under_no_grad() -> None:
    with torch.no_grad():
        plan = torchecho.plan(Scaled(), torch.randn(4, 8), max_slowdown=0.0, cost="roofline")
    assert plan.num_ops > 0


def test_a_model_without_gradients_cannot_be_planned() -> None:
    model = Scaled().requires_grad_(requires_grad=False)
    with pytest.raises(torchecho.EchoError, match="the model makes no gradient for any parameter in this call"):
        torchecho.plan(model, torch.randn(4, 8), max_slowdown=0.0, cost="roofline", engine="compile")
    with pytest.raises(torchecho.EchoError, match="Scaled returns nothing that has a gradient"):
        torchecho.plan(model, torch.randn(4, 8), max_slowdown=0.0, cost="roofline", engine="eager")


# Dynamo itself looks at the gradient of the value that it hands from one piece to the next.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_plan_of_several_pieces_says_so() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.a(x))
            torch._dynamo.graph_break()
            return torch.tanh(self.b(x)).sum()

    before = len(torchecho.plans())
    plan = torchecho.plan(Broken(), torch.randn(16, 8), max_slowdown=0.0, cost="roofline", engine="compile")
    assert plan.notes[-1] == "the model is captured in 2 pieces; this is the one with the highest peak"
    assert plan.predicted_peak_bytes == max(p.predicted_peak_bytes for p in torchecho.plans()[before:])


def test_an_unknown_engine_door_is_named() -> None:
    with pytest.raises(torchecho.OptionError, match="engine must be one of"):
        torchecho.optimize(Scaled(), engine="egaer")


def test_measure_counts_a_step_by_hand() -> None:
    x = torch.ones(1000)

    def step() -> None:
        a = x.exp()
        b = a + a
        del a
        c = b * b
        del b, c

    step()
    measured = torchecho.measure(step)
    # a and b together, then b and c: 4000 bytes each
    assert measured.peak_bytes - measured.base_bytes == 8000
    assert measured.base_bytes >= 4000
    assert [live - measured.base_bytes for live in measured.timeline.live_bytes] == [4000, 8000, 4000, 8000, 4000, 0]
    assert measured.seconds > 0


def test_every_public_name_is_there_and_listed() -> None:
    assert dir(torchecho) == sorted(torchecho.__all__)
    assert all(getattr(torchecho, name) is not None for name in torchecho.__all__)


def test_every_error_is_public() -> None:
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert set(kinds) <= set(torchecho.__all__)
    assert all(getattr(torchecho, name) is kind for name, kind in kinds.items())


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'torchecho' has no attribute 'optimise'"):
        torchecho.optimise  # noqa: B018 - asking for it is the test
    assert not hasattr(torchecho, "optimise")


def test_deciding_needs_no_torch() -> None:
    rooms = ["torchecho"]
    for room in ("ir", "cost", "simulate", "planner", "report"):
        package = importlib.import_module(f"torchecho.{room}")
        rooms += [module.name for module in pkgutil.walk_packages(package.__path__, f"torchecho.{room}.")]
    assert "torchecho.planner.planner" in rooms
    code = (
        f"import importlib, sys; [importlib.import_module(name) for name in {rooms}]; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "eager"),
        ({"lowering": "eager"}, "compile"),
        ({"dynamic": False}, "compile"),
        ({"engine": "compile"}, "compile"),
    ],
)
def test_engine_is_eager_unless_something_speaks_for_compile(options: dict[str, object], expected: str) -> None:
    model = Scaled()
    torchecho.optimize(torchecho.optimize(model, max_slowdown=0.1), max_slowdown=0.1, **options)
    loss = model(torch.randn(4, 8)).sum()
    # A compiled graph hangs behind one node of its own.
    assert ("CompiledFunction" in type(loss.grad_fn.next_functions[0][0]).__name__) == (expected == "compile")


def test_a_model_that_the_user_compiles_stays_compiled() -> None:
    model = Scaled()
    model.compile(backend="aot_eager")
    torchecho.optimize(model, max_slowdown=0.1)
    loss = model(torch.randn(4, 8)).sum()
    assert "CompiledFunction" in type(loss.grad_fn.next_functions[0][0]).__name__


def test_plan_of_the_eager_engine_is_that_of_its_first_step() -> None:
    torch.manual_seed(0)
    model = Loss(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 1)))
    x = torch.randn(32, 16)
    foreseen = torchecho.plan(model, x, max_slowdown=0.5, cost="roofline", engine="eager")
    torchecho.optimize(model, max_slowdown=0.5, cost="roofline", strict=True)
    model(x).backward()
    made = torchecho.plans()[-1]
    assert foreseen.schedule == made.schedule
    assert foreseen.predicted_peak_bytes == made.predicted_peak_bytes


@pytest.mark.parametrize("engine", ["eager", "compile"])
def test_a_forward_that_looks_at_values_cannot_be_planned_before_it_runs(engine: str) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y.sum() if float(y.sum()) > 0 else -y.sum()

    with pytest.raises(torchecho.CaptureError, match=r"Looks cannot be planned before it runs.*after its first step"):
        torchecho.plan(Looks(), torch.randn(4, 8), max_slowdown=0.1, engine=engine)


@pytest.mark.parametrize(
    ("example", "text"),
    [
        ((torch.ones(2, 8), 3), "example_kwargs must be a dict .* object of type int"),
        ((3,), "example_args must be a tensor or a tuple .* object of type int"),
        (({"x": torch.ones(2, 8)},), "example_args .* object of type dict"),
        (("x",), "example_args .* object of type str"),
    ],
)
def test_an_example_that_is_no_arguments_is_named(example: tuple[object, ...], text: str) -> None:
    with pytest.raises(torchecho.OptionError, match=text):
        torchecho.plan(Scaled(), *example)


@pytest.mark.parametrize("times", [0, 1, 2])
def test_disable_gives_the_users_own_compiled_call_back(times: int) -> None:
    model = Scaled()
    model.compile(backend="aot_eager")
    before = model._compiled_call_impl
    for engine in ("compile", "eager")[:times]:
        torchecho.optimize(model, max_slowdown=0.1, engine=engine)
        assert model._compiled_call_impl is not before
    assert torchecho.disable(model) is model
    assert model._compiled_call_impl is before


def test_disable_takes_away_what_was_optimized_more_than_once() -> None:
    model = torchecho.optimize(torchecho.optimize(Scaled(), max_slowdown=0.1), max_slowdown=0.1)
    assert torchecho.disable(model)._compiled_call_impl is None


@pytest.mark.parametrize("call", [torchecho.optimize, torchecho.disable, torchecho.plan])
def test_what_is_no_module_is_named(call: Callable[[object], object]) -> None:
    with pytest.raises(torchecho.OptionError, match=rf"^{call.__name__} takes a torch\.nn\.Module, found list$"):
        call([Scaled()])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"engine": "eager", "lowering": "inductor"}, "lowering='inductor' is of the compile engine"),
        ({"engine": "eager", "dynamic": True}, "dynamic=True is of the compile engine"),
        ({"engine": "eager", "dynamic": False}, "dynamic=False is of the compile engine"),
        ({"dynamic": "yes"}, "dynamic must be True, False, or None .*; got 'yes' of type str"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(options: dict[str, object], text: str) -> None:
    model = Scaled()
    with pytest.raises(torchecho.OptionError, match=text):
        torchecho.optimize(model, max_slowdown=0.1, **options)
    assert model._compiled_call_impl is None


def test_plan_refuses_what_its_engine_cannot_do() -> None:
    with pytest.raises(torchecho.OptionError, match="lowering='eager' is of the compile engine"):
        torchecho.plan(Scaled(), torch.ones(2, 8), engine="eager", lowering="eager")


@pytest.mark.parametrize("options", [{"engine": "compile"}, {"engine": "compile", "lowering": "inductor"}])
def test_a_block_of_code_cannot_be_compiled(options: dict[str, object]) -> None:
    with pytest.raises(torchecho.OptionError, match="budget runs a block of code under the eager engine"):
        torchecho.budget("1GiB", **options)
    with pytest.raises(torchecho.OptionError, match="lowering='inductor' is of the compile engine"):
        torchecho.budget("1GiB", lowering="inductor")
    torchecho.budget("1GiB", engine="auto", lowering="auto")


def test_a_backend_cannot_be_the_eager_engine() -> None:
    model = torch.compile(Scaled(), backend="torchecho", options={"engine": "eager"})
    with pytest.raises(torchecho.OptionError, match=r"a backend of torch\.compile is the compile engine"):
        model(torch.ones(2, 8))
