"""Progress of a long command: one changing line on a terminal, plain lines in a pipe."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console
from rich.markup import escape


@contextlib.contextmanager
def open_progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Give a function that shows a line of progress, with the seconds since the beginning."""
    started = time.monotonic()
    if not console.is_terminal:
        yield lambda text: console.print(_line(text, started), markup=False, soft_wrap=True)
        return
    with console.status("starting") as status:
        yield lambda text: status.update(escape(_line(text, started)))


@contextlib.contextmanager
def notice_after(seconds: float, text: str, stream: TextIO) -> Iterator[None]:
    """Write one line if what happens inside takes longer than some seconds."""
    timer = threading.Timer(seconds, stream.write, (f"{text}\n",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _line(text: str, started: float) -> str:
    return f"[{time.monotonic() - started:5.0f} s] {text}"
