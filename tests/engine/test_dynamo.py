"""Errors keep class and message on their way through Dynamo."""

import pytest
from torch._dynamo.exc import ShortenTraceback

from torchecho.engine.dynamo import through_dynamo, without_dynamo
from torchecho.errors import BudgetError, EchoError, OptionError

KINDS = [EchoError, OptionError, BudgetError]
ADVICE = "\n\nSet TORCHDYNAMO_VERBOSE=1 for the internal stack trace"


@pytest.mark.parametrize("kind", KINDS)
def test_class_and_message_stay(kind: type[EchoError]) -> None:
    carried = through_dynamo(kind("budget 3 B is below the floor"))
    assert isinstance(carried, kind)
    assert isinstance(carried, ShortenTraceback)  # what Dynamo hands on as it is
    assert (type(carried).__name__, type(carried).__module__) == (kind.__name__, kind.__module__)
    assert str(carried) == "budget 3 B is below the floor"


@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_error_comes_back_without_advice(kind: type[EchoError]) -> None:
    carried = through_dynamo(kind("line one\n\nline two"))
    carried.args = (str(carried) + ADVICE,)
    plain = without_dynamo(carried)
    assert type(plain) is kind
    assert str(plain) == "line one\n\nline two"


def test_going_through_twice_changes_nothing() -> None:
    carried = through_dynamo(BudgetError("no"))
    assert through_dynamo(carried) is carried


def test_an_error_that_never_met_dynamo_is_left_alone() -> None:
    error = OptionError("no")
    assert without_dynamo(error) is error


def test_a_carried_error_can_be_raised_and_caught() -> None:
    with pytest.raises(BudgetError, match=r"^no$") as caught:
        raise through_dynamo(BudgetError("no"))
    assert isinstance(caught.value, ValueError)
