"""Which calls are repeated together, and which stay alone, told by the names of the operators."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.steps import record
from torchecho.capture.follow_ups import CHANGED_ITSELF, CHANGED_LATER, find_repetitions
from torchecho.capture.tape_graph import keep_reasons

Program = Callable[[Tensor, nn.Parameter], Tensor]


def found(program: Program) -> tuple[list[str], dict[str, str]]:
    """Return the repetitions of a program, and why its other calls that make or change something are kept."""
    torch.manual_seed(0)
    recording = record(program, torch.randn(4, 16), nn.Parameter(torch.randn(16, 16)))
    end = recording.backward_starts
    reasons = keep_reasons(recording, end)
    units = find_repetitions(recording, end, reasons)
    name = [call.func.overloadpacket.__name__ for call in recording.calls]
    does = [bool(call.allocates or call.writes) for call in recording.calls]
    kept = {name[p]: reason for p, reason in reasons.items() if does[p]}
    return [" ".join(name[p] for p in unit) for unit in units], kept


def test_activation_in_place() -> None:
    units, reasons = found(lambda x, w: F.relu((x @ w).tanh() * 1.0, inplace=True).exp().sum())
    assert units == ["mul relu_"]
    assert reasons == {}


def test_sum_in_place_with_what_is_made_in_between() -> None:
    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        y = x @ w
        y += torch.tanh(x) * 2.0
        return F.relu_(y).exp().sum()

    assert found(program) == (["mm add_ relu_"], {})


def test_changes_of_parts() -> None:
    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        a, b = (x @ w).unsafe_chunk(2, 1)
        a.sigmoid_()
        b.mul_(a.detach())
        return (a * b).sum()

    assert found(program) == (["mm sigmoid_ mul_"], {})


def test_change_that_autograd_does_not_see() -> None:
    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        y = x @ w
        doubled = y * 2.0  # nobody saves it
        doubled.data.mul_(0.5)
        first = torch.tanh(y)
        first.data.mul_(0.5)
        return (first + doubled).sum()

    units, kept = found(program)
    assert units == ["mul mul_"]
    assert kept["tanh"] == "the program changes it after it is saved, where autograd does not see it"


def test_what_is_read_before_a_change_and_saved_is_repeated_in_between() -> None:
    # The backward of an in-place product saves a clone of what it changes.
    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        y = x @ w
        y.mul_(torch.sigmoid(y))
        return y.exp().sum()

    assert found(program) == (["mm sigmoid clone mul_"], {})


def test_what_is_read_before_a_change_and_not_wanted_is_not_repeated() -> None:
    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        y = x @ w
        early = y.detach().cosh().sum().item()
        y.add_(1.0)
        return y.exp().sum() * early

    units, reasons = found(program)
    assert units == ["mm add_"]
    assert reasons["cosh"] == CHANGED_LATER


def test_dropout_in_place_reads_its_draw() -> None:
    units, reasons = found(lambda x, w: F.dropout((x @ w) * 1.0, 0.5, inplace=True).exp().sum())
    assert units == ["mul mul_"]
    assert reasons["bernoulli_"] == "changes its arguments"
    assert reasons["empty_like"] == "hands out memory as it is"


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y.uniform_(),  # draws
        lambda y: y.t_(),  # another look
        lambda y: torch.add(y, 1.0, out=y),  # could be given memory of another size
    ],
)
def test_changes_that_may_not_be_repeated(change: Callable[[Tensor], Tensor]) -> None:
    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        y = x.exp()
        change(y)
        return (y.sum() * w).exp().sum()

    units, reasons = found(program)
    assert units == []
    assert CHANGED_ITSELF in reasons.values()


def test_change_by_what_changes_later() -> None:
    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        state = torch.zeros(4, 16)
        y = x @ w
        y.add_(state)
        state.add_(1.0)
        return (y * state).exp().sum()

    units, reasons = found(program)
    assert units == ["zeros add_"]
    assert reasons["mm"] == CHANGED_ITSELF


def test_loop_through_the_storage_that_it_writes() -> None:
    # Each row is made of the one before: together they would have to be whole before any is made.
    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        rows = torch.zeros(4, 16)
        for index in range(1, 4):
            rows[index].copy_(torch.tanh(rows[index - 1].detach() + x[index]))
        return (rows @ w).exp().sum()

    units, reasons = found(program)
    assert reasons["add"] == CHANGED_LATER
    assert units == ["zeros copy_ copy_ copy_"]


def test_result_that_is_read_before_the_others_are_whole() -> None:
    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        low, high = torch.var_mean(x @ w, dim=1)
        early = torch.sin(high)
        low.add_(early)
        return (low * early.exp()).sum()

    units, reasons = found(program)
    assert units == ["var_mean sin add_"]
    assert reasons == {}


def test_unfused_cell_of_a_recurrent_layer() -> None:
    torch.manual_seed(0)
    layer = nn.GRU(16, 16)

    def program(x: Tensor, w: nn.Parameter) -> Tensor:
        return (layer(x.unsqueeze(1))[0] @ w).exp().sum()

    units, reasons = found(program)
    assert units == ["addmm add_ sigmoid_ add_ sigmoid_ clone mul_", "add tanh_", "sub clone mul_ add_"] * 4
    assert reasons == {}
