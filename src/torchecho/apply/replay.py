"""Make copies of recipes: whatever a copy needs and is not there is made first, and stays until it has been read."""

from collections.abc import Sequence

from torchecho.apply.recipe import Recipe

_MANY = 1 << 10  # more results than a call has
_ALWAYS = 1 << 60  # more reads than there are of something that is kept for good


def replay(recipe: Recipe, place: int, *, once: bool) -> int:
    """Make the copy of a recipe for a place, and first whatever it needs that is not there; return how many calls ran.

    Args:
        recipe: What to make.
        place: Autograd node before which the copy stands.
        once: Nobody asks twice: a recipe whose last copy is made can let go of what that was made of.
    """
    readers = recipe.readers.pop(place, {})
    if recipe.is_settled:
        return 0  # made for good since the copy was placed
    for part in recipe.parts:
        if not part.recipe.has(part.result):
            ran = _make(recipe, readers)
            break
    else:
        recipe.expect(readers)
        recipe.run()
        ran = 1
    if once and not recipe.readers:
        recipe.settle()
    return ran


def make(recipe: Recipe, index: int) -> int:
    """Make a result that no plan foresaw, for one reader; return how many calls ran."""
    return _make(recipe, {index: 1})


def make_for_good(recipe: Recipe) -> int:
    """Make all results and keep them: what they are made of is about to be changed. Return how many calls ran."""
    ran = _make(recipe, dict.fromkeys(range(_MANY), _ALWAYS))
    recipe.settle()
    return ran


def _make(recipe: Recipe, readers: dict[int, int]) -> int:
    order = _missing(recipe)
    for one in order:
        one.expect(readers if one is recipe else {})
    _expect_readers(order)
    for one in order:
        one.run()
    return len(order)


def _expect_readers(order: Sequence[Recipe]) -> None:
    """Count what recipes that are about to run will read, so that it stays until then."""
    for one in order:
        for part in one.parts:
            left = part.recipe.readers_left
            left[part.result] = left.get(part.result, 0) + 1


def _missing(recipe: Recipe) -> list[Recipe]:
    """Return all that a recipe needs and is not there, in the order of their calls, and the recipe itself."""
    found = {id(recipe): recipe}
    open_recipes = [recipe]
    while open_recipes:
        for part in open_recipes.pop().parts:
            maker = part.recipe
            if not maker.has(part.result) and id(maker) not in found:
                found[id(maker)] = maker
                open_recipes.append(maker)
    return sorted(found.values(), key=lambda one: one.number)
