"""Watch what the program changes between two backwards of one forward, as an optimizer does that steps after each."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchecho.apply.policy import WRITE, kept_as_it_is
from torchecho.apply.tape import Tape
from torchecho.capture.mode import LightMode


class WriteWatch(LightMode):
    """Has a tape make what reads a storage before the program changes it."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a call."""
        kwargs = kwargs or {}
        if kept_as_it_is(func) is WRITE and not self._tape.is_replaying:
            self._tape.before_writes(func, args, kwargs)
        return func(*args, **kwargs)
