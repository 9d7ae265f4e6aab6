"""Recipes: where copies are placed, how long they live, and what may go wrong between forward and backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torchecho.apply.recipe import Part, Recipe
from torchecho.apply.replay import make, make_for_good, replay
from torchecho.errors import RecomputeError

ATEN = torch.ops.aten


class Counted:
    """A function that counts its calls."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func, self.calls = func, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.func(*args)


def chain(x: Tensor) -> tuple[Recipe, Recipe, Counted, Counted]:
    """Return recipes for tanh(x) and exp(tanh(x))."""
    tanh, exp = Counted(torch.tanh), Counted(torch.exp)
    first, second = Recipe(0, 0, tanh), Recipe(1, 0, exp)
    first.hold((x,), {}, lambda _: None)
    second.hold((x,), {}, lambda _: part_of(first, x))
    return first, second, tanh, exp


def part_of(recipe: Recipe, like: Tensor, result: int = 0) -> Part:
    """Return a whole result of a recipe, of the shape of a tensor."""
    return Part(recipe, result, like.shape, like.stride(), 0)


@pytest.mark.parametrize(
    ("window", "places"),
    [
        (0, [9]),  # one copy, however far apart the uses are
        (1, [9, 3]),  # 9 and 8 are one node apart, 8 and 3 five
        (4, [9, 3]),
        (5, [9]),
    ],
)
def test_places_of_copies(window: int, places: list[int]) -> None:
    recipe = Recipe(0, window, torch.tanh)
    recipe.uses = [(3, 0), (9, 0), (8, 0)]
    assert recipe.places() == places
    assert recipe.uses == []


def test_each_copy_knows_how_often_it_will_be_read() -> None:
    recipe = Recipe(0, 2, torch.tanh)
    recipe.uses = [(9, 0), (9, 1), (8, 0), (3, 1), (3, 1)]
    recipe.places()
    assert recipe.readers == {9: {0: 2, 1: 1}, 3: {1: 2}}


def test_copy_is_dropped_after_its_last_reader() -> None:
    x = torch.randn(3)
    recipe, _, tanh, _ = chain(x)
    recipe.uses = [(5, 0), (4, 0)]
    (place,) = recipe.places()
    assert replay(recipe, place, once=False) == 1
    assert torch.equal(part_of(recipe, x).get(), torch.tanh(x))
    recipe.read_once(0)
    assert recipe.has(0)
    recipe.read_once(0)
    assert not recipe.has(0)
    assert tanh.calls == 1


def test_what_is_missing_is_made_first_and_dropped_again() -> None:
    x = torch.randn(3)
    first, second, tanh, exp = chain(x)
    assert make(second, 0) == 2
    assert torch.equal(part_of(second, x).get(), x.tanh().exp())
    assert not first.has(0)
    assert (tanh.calls, exp.calls) == (1, 1)


def test_what_is_there_is_not_made_again() -> None:
    x = torch.randn(3)
    first, second, tanh, _ = chain(x)
    first.uses = [(7, 0), (5, 0)]  # one for the program, one for the second recipe
    replay(first, first.places()[0], once=True)
    assert make(second, 0) == 1
    assert tanh.calls == 1


def test_copies_asked_for_in_another_order_keep_what_others_wait_for() -> None:
    """A copy that is not read to its end, because another backward comes first, outlives the next copy."""
    x = torch.randn(3)
    recipe, _, _, _ = chain(x)
    recipe.window = 2
    recipe.uses = [(9, 0), (8, 0), (3, 0)]
    assert recipe.places() == [9, 3]
    replay(recipe, 9, once=True)
    recipe.read_once(0)
    replay(recipe, 3, once=True)  # the reader at node 8 has not come yet
    recipe.read_once(0)
    assert recipe.has(0)
    recipe.read_once(0)
    assert not recipe.has(0)


def test_last_copy_lets_go_of_what_it_was_made_of() -> None:
    x = torch.randn(3)
    recipe, _, _, _ = chain(x)
    recipe.window = 1
    recipe.uses = [(9, 0), (3, 0)]
    recipe.places()
    replay(recipe, 9, once=True)
    assert not recipe.is_settled
    replay(recipe, 3, once=True)
    assert recipe.is_settled
    assert recipe.args == ()
    recipe.read_once(0)
    recipe.read_once(0)
    with pytest.raises(RecomputeError, match="retain_graph"):
        make(recipe, 0)


def test_made_for_good_stays_whoever_reads() -> None:
    x = torch.randn(3)
    recipe, second, tanh, _ = chain(x)
    expected = x.tanh()
    recipe.uses = [(9, 0)]
    places = recipe.places()
    make_for_good(recipe)
    x.zero_()
    assert replay(recipe, places[0], once=True) == 0
    for _ in range(3):
        recipe.read_once(0)
        make(second, 0)
        assert torch.equal(part_of(second, x).get(), expected.exp())
    assert tanh.calls == 1


def test_start_anew_forgets_copies() -> None:
    x = torch.randn(3)
    recipe, _, tanh, _ = chain(x)
    recipe.uses = [(9, 0), (8, 0)]
    replay(recipe, recipe.places()[0], once=False)
    recipe.start_anew()
    assert not recipe.has(0)
    recipe.uses = [(9, 0)]
    replay(recipe, recipe.places()[0], once=False)
    recipe.read_once(0)
    assert not recipe.has(0)
    assert tanh.calls == 2


def test_views_are_looked_up_in_the_newest_copy() -> None:
    x = torch.randn(4, 6)
    recipe, _, _, _ = chain(x)
    view = x.tanh().t()[1:3]
    part = Part(recipe, 0, view.shape, view.stride(), view.storage_offset())
    make(recipe, 0)
    assert torch.equal(part.get(), view)


def test_only_results_that_are_read_are_kept() -> None:
    recipe = Recipe(0, 0, lambda t: torch.var_mean(t, 1))
    recipe.hold((torch.randn(3, 4),), {}, lambda _: None)
    make(recipe, 1)
    assert (recipe.has(0), recipe.has(1)) == (False, True)


def test_tensors_in_lists_are_held() -> None:
    x, y = torch.randn(3), torch.randn(3)
    recipe = Recipe(0, 0, torch.cat)
    assert recipe.hold(([x, y], 0), {}, lambda _: None) == [x, y]
    make(recipe, 0)
    assert torch.equal(recipe.made[0], torch.cat([x, y]))


def test_what_was_changed_in_place_is_not_read() -> None:
    x = torch.randn(3)
    recipe, _, _, _ = chain(x)
    x.add_(1)
    with pytest.raises(RecomputeError, match=r"changed in place .* \(version 1, expected 0\)"):
        make(recipe, 0)


def test_inference_tensors_are_held() -> None:
    with torch.inference_mode():
        x = torch.randn(3)
    recipe, _, _, _ = chain(x)
    make(recipe, 0)
    assert torch.equal(recipe.made[0], x.tanh())


def test_statistics_of_batch_normalisation_are_updated_once() -> None:
    x, mean, variance = torch.randn(5, 3), torch.zeros(3), torch.ones(3)
    weight, bias = torch.ones(3), torch.zeros(3)
    args = (x, weight, bias, mean, variance, True, 0.1, 1e-5)
    recipe = Recipe(0, 0, ATEN.native_batch_norm.default)
    recipe.hold(args, {}, lambda _: None)
    made = ATEN.native_batch_norm.default(*args)
    after = mean.clone(), variance.clone()
    make(recipe, 0)
    assert torch.equal(recipe.made[0], made[0])
    assert torch.equal(mean, after[0])
    assert torch.equal(variance, after[1])


def test_statistics_that_are_used_are_read() -> None:
    x, mean, variance = torch.randn(5, 3), torch.randn(3), torch.rand(3) + 1
    args = (x, None, None, mean, variance, False, 0.1, 1e-5)
    recipe = Recipe(0, 0, ATEN.native_batch_norm.default)
    recipe.hold(args, {}, lambda _: None)
    make(recipe, 0)
    assert torch.equal(recipe.made[0], ATEN.native_batch_norm.default(*args)[0])
