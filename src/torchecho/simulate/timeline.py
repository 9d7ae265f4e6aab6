"""The timeline: live bytes at each step of a training step, predicted or measured."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torchecho.errors import MeasureError


@dataclass(frozen=True, slots=True)
class Timeline:
    """Live bytes at each step of a schedule, or at each allocation and free of a real step.

    Attributes:
        live_bytes: Bytes live at step i, the base included.
        base_bytes: Bytes live before the first step.
        labels: What ran at each step; empty when nobody knows.
        by_category: Bytes of each category at each step; None when they were not told apart.

    Raises:
        MeasureError: labels or a category have another length than live_bytes.
    """

    live_bytes: tuple[int, ...]
    base_bytes: int
    labels: tuple[str, ...] = ()
    by_category: Mapping[str, tuple[int, ...]] | None = None

    def __post_init__(self) -> None:
        """Check that every series has one entry a step."""
        series = {"labels": len(self.labels) or len(self.live_bytes)}
        series.update((name, len(column)) for name, column in (self.by_category or {}).items())
        for name, length in series.items():
            if length != len(self.live_bytes):
                raise MeasureError(
                    f"a timeline of {len(self.live_bytes)} steps has {length} entries of {name!r}: give one a step"
                )

    @property
    def peak_bytes(self) -> int:
        """Most bytes live at once; never below the base, which is live before the first step."""
        return max(self.base_bytes, max(self.live_bytes, default=0))

    @property
    def peak_step(self) -> int:
        """First step at which the most bytes are live; 0 when there are no steps."""
        return max(range(len(self.live_bytes)), key=self.live_bytes.__getitem__, default=0)

    def to_dict(self) -> dict[str, Any]:
        """Return the timeline as JSON types."""
        categories = self.by_category
        return {
            "live_bytes": list(self.live_bytes),
            "base_bytes": self.base_bytes,
            "labels": list(self.labels),
            "by_category": None if categories is None else {str(name): list(row) for name, row in categories.items()},
        }

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Self:
        """Make a timeline from what `to_dict` returned.

        Raises:
            MeasureError: a field is missing or has another type.
        """
        try:
            categories = body["by_category"]
            return cls(
                live_bytes=tuple(int(n) for n in body["live_bytes"]),
                base_bytes=int(body["base_bytes"]),
                labels=tuple(str(label) for label in body["labels"]),
                by_category=None if categories is None else {k: tuple(map(int, v)) for k, v in categories.items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MeasureError(f"cannot read a timeline: {error!r}; expected the fields that to_dict writes") from error

    def to_json(self) -> str:
        """Return the timeline as JSON text."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Raises:
            MeasureError: the text is not a timeline.
        """
        try:
            body = json.loads(text)
        except ValueError as error:
            raise MeasureError(f"cannot read a timeline: not JSON ({error})") from error
        return cls.from_dict(body)
