"""Which steps of other sizes are recorded, to be given a plan of their own."""

from typing import Any

import pytest
import torch

from tests.engine.eager_steps import SIZE, network
from torchecho.engine.door import eager_call
from torchecho.engine.planning import Surroundings
from torchecho.options import parse_options


@pytest.mark.parametrize(
    ("asked", "is_recorded"),
    [({"max_slowdown": 100.0}, True), ({"memory_budget": "1GiB"}, False)],
    ids=["recomputes", "recomputes nothing"],
)
def test_much_smaller_steps_are_recorded_where_the_plan_of_larger_ones_costs_time(
    asked: dict[str, Any], is_recorded: bool
) -> None:
    model = network()
    call = eager_call(model, Surroundings(parse_options({**asked, "cost": "roofline", "strict": True})))
    engine = call.args[1]  # type: ignore[attr-defined]  # what the door binds
    call(torch.randn(64, SIZE)).pow(2).mean().backward()
    model.zero_grad()

    def records(rows: int) -> bool:
        return engine.choose(engine.situation([torch.randn(rows, SIZE)])).records

    assert [records(64), records(60), records(16)] == [False, False, is_recorded]
    assert records(65)
