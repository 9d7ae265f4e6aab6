import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest

from torchecho.errors import EchoError, OptionError
from torchecho.options import Options, parse_options


class Adam:
    """Looks like an optimizer to a module that knows no torch."""

    param_groups = ()


def message_for(**given):
    with pytest.raises(OptionError) as caught:
        parse_options(given)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_nothing_given_is_the_defaults():
    options = parse_options({})
    assert options == Options(None, None, "auto", "auto", "auto", strict=False, optimizer=None)
    assert options.effective_max_slowdown == 0.05


def test_a_budget_alone_sets_no_limit_on_time():
    assert parse_options({"memory_budget": "1GiB"}).effective_max_slowdown is None


@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_a_slowdown_that_was_asked_stays(budget):
    options = parse_options({"memory_budget": budget, "max_slowdown": 0.2})
    assert options.effective_max_slowdown == 0.2


def test_no_slowdown_at_all_differs_from_not_asking():
    assert parse_options({"max_slowdown": 0}).effective_max_slowdown == 0.0


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("8GiB", 8_589_934_592),
        ("900MB", 900_000_000),
        ("4096", 4096),
        (1, 1),
        (2**40, 2**40),
        (np.int64(7), 7),
        (0.5, 0.5),
        (1.0, 1.0),
        (np.float32(0.25), 0.25),
        ("0.5", 0.5),
        (" 1.0 ", 1.0),
        ("0.5GiB", 536_870_912),
        ("auto", "auto"),
        ("AUTO", "auto"),
        (None, None),
    ],
)
def test_budgets(budget, expected):
    parsed = parse_options({"memory_budget": budget}).memory_budget
    assert parsed == expected
    assert type(parsed) is type(expected)


@pytest.mark.parametrize("budget", [0, -1, "0", "0GiB", "0.1 B", np.int32(0)])
def test_a_budget_of_no_bytes_is_refused(budget):
    assert f"more than 0 bytes; got {budget!r}" in message_for(memory_budget=budget)


@pytest.mark.parametrize("budget", [0.0, -0.5, 1.0001, 2.0, math.nan, math.inf, "0.0", "1.5"])
def test_a_fraction_outside_its_range_is_refused(budget):
    message = message_for(memory_budget=budget)
    assert "(0, 1]" in message
    assert repr(budget) in message


@pytest.mark.parametrize("budget", ["", "lots", "8 parsecs", "-8GiB", "50%"])
def test_a_budget_that_cannot_be_read_is_refused(budget):
    message = message_for(memory_budget=budget)
    assert message.startswith("memory_budget")
    assert "GiB" in message


@pytest.mark.parametrize("budget", [True, False, [1], {}, object(), 1j, b"8GiB"])
def test_a_budget_of_the_wrong_type_is_refused(budget):
    message = message_for(memory_budget=budget)
    assert type(budget).__name__ in message
    assert "8GiB" in message


@pytest.mark.parametrize(
    ("slowdown", "expected"), [(0, 0.0), (0.35, 0.35), (2, 2.0), (math.inf, math.inf), (None, None)]
)
def test_slowdowns(slowdown, expected):
    assert parse_options({"max_slowdown": slowdown}).max_slowdown == expected


@pytest.mark.parametrize("slowdown", [-0.01, -1, math.nan, -math.inf])
def test_a_slowdown_out_of_range_is_refused(slowdown):
    assert message_for(max_slowdown=slowdown) == f"max_slowdown must be 0 or more; got {slowdown!r}"


@pytest.mark.parametrize("slowdown", ["0.1", True, [], 1j])
def test_a_slowdown_of_the_wrong_type_is_refused(slowdown):
    assert f"of type {type(slowdown).__name__}" in message_for(max_slowdown=slowdown)


@pytest.mark.parametrize("engine", ["auto", "compile", "eager"])
def test_engines(engine):
    assert parse_options({"engine": engine}).engine == engine


@pytest.mark.parametrize("lowering", ["auto", "inductor", "eager"])
def test_lowerings(lowering):
    assert parse_options({"lowering": lowering}).lowering == lowering


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"engine": "egaer"}, "did you mean 'eager'?"),
        ({"engine": "inductor"}, "'auto', 'compile', 'eager'"),
        ({"engine": None}, "NoneType"),
        ({"lowering": "compile"}, "'auto', 'inductor', 'eager'"),
        ({"lowering": "inducter"}, "did you mean 'inductor'?"),
        ({"lowering": 3}, "3 of type int"),
        ({"cost": "rofline"}, "did you mean 'roofline'?"),
        ({"cost": "/no/such/table.json"}, "path of a table that exists"),
        ({"cost": None}, "'auto', 'roofline', 'measured'"),
        ({"strict": 1}, "strict must be True or False; got 1 of type int"),
        ({"strict": "yes"}, "'yes' of type str"),
        ({"optimizer": "adam"}, "must be a torch optimizer; got 'adam' of type str"),
        ({"optimizer": Adam}, "of type type"),
    ],
)
def test_a_wrong_choice_names_the_right_ones(given, hint):
    assert hint in message_for(**given)


@pytest.mark.parametrize("cost", ["auto", "roofline", "measured"])
def test_cost_sources(cost):
    assert parse_options({"cost": cost}).cost == cost


def test_a_cost_table_may_be_a_path_or_text(tmp_path):
    table = tmp_path / "table.json"
    table.write_text("{}")
    assert parse_options({"cost": table}).cost == str(table)
    assert parse_options({"cost": str(table)}).cost == str(table)


def test_strict_and_optimizer():
    adam = Adam()
    options = parse_options({"strict": True, "optimizer": adam})
    assert options.strict is True
    assert options.optimizer is adam


def test_an_unknown_option_names_the_nearest_and_lists_all():
    message = message_for(memory_buget="1GiB")
    assert message == (
        "unknown option 'memory_buget', did you mean 'memory_budget'?"
        " (options: memory_budget, max_slowdown, engine, lowering, cost, strict, optimizer;"
        " of optimize alone: largest, dynamic)"
    )
    assert "did you mean 'largest'?" in message_for(larges=1)
    assert "did you mean 'dynamic'?" in message_for(dynamc=True)


def test_an_unknown_option_like_no_other_suggests_none():
    assert "did you mean" not in message_for(zzz=1)


def test_a_name_that_is_no_text_is_refused():
    with pytest.raises(OptionError, match="unknown option 3"):
        parse_options({3: 1})


def test_a_long_wrong_value_is_not_printed_whole():
    message = message_for(memory_budget=[0] * 1000)
    assert len(message) < 200


def test_options_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse_options({}).strict = True


def test_errors_can_be_caught_as_ours_and_as_value_errors():
    with pytest.raises(EchoError):
        parse_options({"strict": 1})
    with pytest.raises(ValueError, match="strict"):
        parse_options({"strict": 1})


def test_needs_no_torch():
    program = "import sys, torchecho.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
