"""torchecho's own recurrent modules under both engines: the bits of the plain module, at the predicted peak."""

import copy

import pytest
import torch
from torch import Tensor, nn

import torchecho
from tests.end_to_end.models import Case, Loss
from tests.end_to_end.steps import Left, differences, prepare, run_step
from torchecho.planner.plan import Plan

T, B, SIZE = 20, 8, 24
STEPS = 3


class Cell(nn.Module):
    """A cell of the user's own: a GRU's, which also returns its state as its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRUCell(SIZE, SIZE)

    def initial_state(self, x: Tensor) -> Tensor:
        """Return zeros."""
        return x.new_zeros(x.shape[0], SIZE)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Take a step."""
        h = self.inner(x, h)
        return h, h


class Reader(nn.Module):
    """Two recurrent modules between linear layers, so that a plan has something to recompute."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.before, self.first, self.second = nn.Linear(SIZE, SIZE), first, second
        self.between, self.after = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        """Map (T, B, SIZE) to the same."""
        x = torch.tanh(self.between(self.first(torch.tanh(self.before(x)))[0]))
        return self.after(torch.relu(self.second(x)[0]))


def _variant() -> nn.Module:
    noise = {"recurrent_dropout": 0.2, "zoneout": 0.1}
    return torchecho.nn.VariantLSTM(SIZE, SIZE, layer_norm=True, peephole=True, **noise)


MAKERS = {
    "lstm": lambda: torchecho.nn.LSTM(SIZE, SIZE),
    "gru": lambda: torchecho.nn.GRU(SIZE, SIZE),
    "rnn": lambda: torchecho.nn.RNN(SIZE, SIZE),
    "converted": lambda: torchecho.nn.convert(nn.LSTM(SIZE, SIZE, num_layers=2, dropout=0.2)),
    "variant": _variant,
    "recurrent": lambda: torchecho.nn.Recurrent(Cell()),
}


def case(name: str) -> Case:
    """Return a model with two modules of a kind."""
    return Case(lambda: Loss(Reader(MAKERS[name](), MAKERS[name]())), lambda: (torch.randn(T, B, SIZE),))


def steps(name: str, **options: object) -> tuple[list[Left], Plan | None]:
    """Do some steps and return what each left, and the plan; without options as the model is."""
    torch._dynamo.reset()
    options = {"strict": True, **options} if options else {}
    model, inputs = prepare(case(name), **options)
    left = []
    for _ in range(STEPS):
        model.zero_grad(set_to_none=True)
        left.append(copy.deepcopy(run_step(model, inputs, model)))
    return left, torchecho.plans()[-1] if options else None


@pytest.mark.filterwarnings("ignore:.*over the budget:torchecho.errors.EchoWarning")
@pytest.mark.parametrize("name", MAKERS)
def test_the_eager_engine_has_the_bits_of_the_plain_module_at_every_budget(name: str) -> None:
    plain, _ = steps(name)
    _, untouched = steps(name, engine="eager", max_slowdown=0.0)
    for options in ({"max_slowdown": 0.0}, {"max_slowdown": 100.0}, {"memory_budget": untouched.frontier[-1][0]}):
        left, plan = steps(name, engine="eager", **options)
        assert [differences(a, b) for a, b in zip(plain, left, strict=True)] == [[]] * STEPS
        assert abs(plan.measured_peak_bytes / plan.predicted_peak_bytes - 1) <= 0.01
    assert plan.measured_peak_bytes <= untouched.frontier[-1][0]
    assert plan.num_recomputed > 0


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("name", ["converted", "variant", "recurrent"])
def test_the_compile_engine_has_the_bits_of_its_reference(name: str, lowering: str) -> None:
    options = {"engine": "compile", "lowering": lowering}
    reference, untouched = steps(name, **options, max_slowdown=0.0)
    left, plan = steps(name, **options, max_slowdown=100.0)
    assert (untouched.lowering, plan.lowering) == (lowering, lowering)
    assert [differences(a, b) for a, b in zip(reference, left, strict=True)] == [[]] * STEPS
    # Which layers rebuild at no slowdown depends on the measured costs: there may be nothing left to gain.
    assert plan.predicted_peak_bytes == min(peak for peak, _ in plan.frontier) <= untouched.predicted_peak_bytes
    assert abs(plan.measured_peak_bytes / plan.predicted_peak_bytes - 1) <= 0.01
