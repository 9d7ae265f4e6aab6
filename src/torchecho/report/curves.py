"""Curves in plain text: several series over the same steps, and where they coincide."""

from collections.abc import Mapping, Sequence

_TOGETHER = "#"


def plot_curves(curves: Mapping[str, Sequence[float]], *, width: int = 64, height: int = 10) -> list[str]:
    """Draw series over a shared axis of steps, one mark each; cells that several series meet in are ``#``.

    Args:
        curves: Values of each series by its name; the first letter of a name is its mark.
        width: Columns of the drawing; longer series are thinned, not averaged.
        height: Rows of the drawing.

    Returns:
        Lines of text, the legend last; none when there is nothing to draw.
    """
    values = [value for curve in curves.values() for value in curve]
    if not values:
        return []
    low, high = min(values), max(values)
    num_steps = max(map(len, curves.values()))
    columns = min(width, num_steps)
    picture = [[" "] * columns for _ in range(height)]
    for name, curve in curves.items():
        for column in range(columns):
            step = column * (num_steps - 1) // max(columns - 1, 1)
            if step < len(curve):
                row = round((high - curve[step]) / (high - low) * (height - 1)) if high > low else 0
                picture[row][column] = name[0] if picture[row][column] == " " else _TOGETHER
    labels = [f"{high - (high - low) * row / max(height - 1, 1):8.3f}" for row in range(height)]
    lines = [f"{label} |{''.join(cells).rstrip()}" for label, cells in zip(labels, picture, strict=True)]
    legend = ", ".join(f"{name[0]} {name}" for name in curves)
    return [*lines, f"{'':8} +{'-' * columns}", f"{'':10}steps 1 to {num_steps}; {legend}; {_TOGETHER} where they meet"]
