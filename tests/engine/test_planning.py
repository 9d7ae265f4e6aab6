"""How much of a budget a piece of a step may take, and what is said where it cannot keep to it."""

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor, FakeTensorMode

from tests.capture.joint import capture
from torchecho.capture.fx import JointCapture
from torchecho.engine.planning import Surroundings, device_of, plan_capture
from torchecho.errors import BudgetError
from torchecho.options import parse_options
from torchecho.planner.plan import Plan
from torchecho.planner.request import Part

# x, 16 numbers of 4 bytes, is all that is there throughout.
FIXED = 64


def waves(x: Tensor) -> Tensor:
    """Chain ops whose values the backward reads."""
    return x.tanh().sigmoid().tanh().sigmoid().sum()


@pytest.fixture
def captured() -> JointCapture:
    """Return the capture of `waves`."""
    return capture(waves, torch.randn(4, 4, requires_grad=True))


def plan_of(captured: JointCapture, part: Part, **options: object) -> Plan:
    """Plan a capture at roofline costs, which need no measuring."""
    surroundings = Surroundings(parse_options({"cost": "roofline", **options}))
    return plan_capture(captured, surroundings, name="waves", part=part)


@pytest.mark.parametrize("part", [Part.WHOLE, Part.LAST])
def test_a_whole_step_and_the_last_piece_take_all_the_room(captured: JointCapture, part: Part) -> None:
    assert plan_of(captured, part, memory_budget=1000).budget_bytes == 1000


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (1064, 1064 - 500),  # 1000 bytes of room, of which 500 are left to the pieces that follow
        (1065, 1065 - 500),  # half of 1001, in whole bytes, leaves this piece the odd one
    ],
)
def test_a_piece_that_more_follow_takes_half_of_the_room(captured: JointCapture, budget: int, expected: int) -> None:
    assert plan_of(captured, Part.MORE_FOLLOWS, memory_budget=budget).budget_bytes == expected


def test_a_fraction_is_one_of_the_untouched_peak(captured: JointCapture) -> None:
    untouched = plan_of(captured, Part.WHOLE, max_slowdown=0.0)
    halved = plan_of(captured, Part.WHOLE, memory_budget=1.0)
    assert halved.budget_bytes == untouched.baseline_peak_bytes


def test_without_a_budget_there_is_nothing_to_halve(captured: JointCapture) -> None:
    plans = [plan_of(captured, part, max_slowdown=0.3) for part in Part]
    assert [p.budget_bytes for p in plans] == [None] * len(Part)
    assert len({p.schedule for p in plans}) == 1


@pytest.mark.parametrize("part", [Part.MORE_FOLLOWS, Part.LAST])
def test_a_piece_goes_to_its_floor_with_a_note(captured: JointCapture, part: Part) -> None:
    plan = plan_of(captured, part, memory_budget=FIXED + 2)
    assert plan.predicted_peak_bytes == plan.floor_bytes > FIXED + 2
    assert plan.notes[-1] == "a graph break splits the step; this piece is at its floor, over its share"


def test_a_whole_step_over_its_budget_is_an_error(captured: JointCapture) -> None:
    with pytest.raises(BudgetError, match="budget 66 B is below the floor"):
        plan_of(captured, Part.WHOLE, memory_budget=FIXED + 2)


def test_a_budget_that_the_device_does_not_have_is_noted(captured: JointCapture) -> None:
    plan = plan_of(captured, Part.WHOLE, memory_budget=2**60)
    assert "is more than the device has" in plan.notes[-1]


def test_the_device_is_that_of_the_first_accelerator() -> None:
    graph, mode = fx.Graph(), FakeTensorMode()
    for name, device in (("a", "cpu"), ("c", "cuda:1"), ("d", "cuda:0")):
        graph.placeholder(name).meta["val"] = FakeTensor(mode, torch.empty(2, device="meta"), torch.device(device))
    graph.output(())
    assert device_of(fx.GraphModule({}, graph)) == torch.device("cuda:1")


def test_without_an_accelerator_the_device_is_the_cpu(captured: JointCapture) -> None:
    assert device_of(captured.module) == torch.device("cpu")
