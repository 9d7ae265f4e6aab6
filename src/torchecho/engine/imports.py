"""Do something as soon as a program has imported a module, and not before.

What a library reads from the environment when it is imported, the program may still set before.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torchecho.errors import EchoError


@contextlib.contextmanager
def from_import_of(name: str, around: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Enter a context once a module has been imported, at once if it has been; leave it at the end.

    Args:
        name: Name of the module.
        around: Returns the context; called when the module is there.

    Raises:
        EchoError: the context cannot be entered; from the import.
    """
    with contextlib.ExitStack() as stack:

        def enter() -> None:
            try:
                stack.enter_context(around())
            except Exception as error:  # it would look like a failure of the import
                raise EchoError(f"cannot watch what uses {name}: {type(error).__name__}: {error}") from error

        if name in sys.modules:
            enter()
            yield
            return
        finder = _Finder(name, enter)
        sys.meta_path.insert(0, finder)
        stack.callback(finder.leave)
        yield


class _Finder(MetaPathFinder):
    """Finds one module as everybody else would, once, and tells when it has been executed."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def leave(self) -> None:
        """Find nothing any more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the signature of a finder
        target: ModuleType | None = None,  # noqa: ARG002 - the signature of a finder
    ) -> ModuleSpec | None:
        """Return the spec that the other finders return, with a loader that tells."""
        if fullname != self._name:
            return None
        self.leave()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            _tell(spec.loader, self._then)
        return spec


def _tell(loader: Any, then: Callable[[], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        then()

    loader.exec_module = exec_module
