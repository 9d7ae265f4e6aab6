"""A plan survives its JSON, refuses damage, and explains itself."""

import json

import pytest

from bench.graphs import transformer
from tests.graphs import random_draw
from tests.planner.plans import make_plan
from torchecho.errors import PlanError
from torchecho.planner.facts import graph_hash
from torchecho.planner.plan import Plan
from torchecho.planner.planner import make_archive
from torchecho.units import format_bytes, format_overhead


@pytest.fixture(scope="module")
def plan():
    return make_plan(make_archive(*transformer(3)), 0.7, None, name="translator")


def test_json_round_trip(plan):
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "{}",
        lambda text: text.replace('"schedule"', '"timetable"'),
        lambda text: text.replace('"format": 1', '"format": 999'),
        lambda text: text.replace('"target"', '"goal"'),
        lambda text: text.replace('"overhead"', '"overheads"'),
    ],
)
def test_damaged_json_is_refused(plan, damage):
    damaged = damage(plan.to_json())
    assert damaged != plan.to_json()
    with pytest.raises(PlanError):
        Plan.from_json(damaged)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("{}", "it is JSON of something else, without a format; it must be the text"),
        ("3", "it is JSON of something else"),
        ("", "it is no JSON"),
        ('{"format": 1}', "it has no 'schedule'; it must be the text"),
    ],
)
def test_what_is_wrong_with_a_text_is_said(text, hint):
    with pytest.raises(PlanError, match=f"^cannot read the plan: {hint}"):
        Plan.from_json(text)


def test_json_holds_plain_numbers(plan):
    body = json.loads(plan.to_json())
    assert body["predicted_peak_bytes"] == plan.predicted_peak_bytes
    assert body["schedule"]["steps"] == list(plan.schedule.steps)


def test_the_explanation_names_modules_lines_floor_and_bound(plan):
    text = plan.explain()
    for part in (
        "translator",
        "layers.0.attn",
        "model.py:softmax",
        f"floor {format_bytes(plan.floor_bytes)}",
        f"untouched {format_bytes(plan.baseline_peak_bytes)}",
        f"less than {format_overhead(plan.overhead_bound)}",
        "recomputed in the backward",
        "stashed for the backward",
        f"budget {format_bytes(plan.budget_bytes)}",
    ):
        assert part in text


def test_the_explanation_says_what_is_never_recomputed():
    counted = random_draw()
    plan = make_plan(make_archive(counted.graph, counted.costs), 1.0, None)
    assert "never recomputed: draws random numbers (1)" in plan.explain()


def test_another_graph_has_another_hash():
    hashes = {graph_hash(transformer(blocks)[0]) for blocks in (1, 2)} | {graph_hash(random_draw().graph)}
    assert len(hashes) == 3
    assert graph_hash(transformer(1)[0]) in hashes
