"""Watch what the program changes between two backwards of one forward, as an optimizer does that steps after each."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from torchecho.apply.policy import WRITE, kept_as_it_is
from torchecho.apply.tape import Tape


class WriteWatch(TorchDispatchMode):
    """Has a tape make what reads a storage before the program changes it."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled parts of the program, such as an optimizer, stay compiled."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a call."""
        kwargs = kwargs or {}
        if kept_as_it_is(func) is WRITE and not self._tape.is_replaying:
            self._tape.before_writes(func, args, kwargs)
        return func(*args, **kwargs)
