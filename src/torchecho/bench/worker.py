"""The process behind `run_job`: reads one request, does the job, answers on the stdout that it was given."""

import json
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping
from typing import TextIO

from torchecho.errors import EchoError, EchoWarning


def main() -> int:
    """Do one job; what libraries print goes to stderr, so that stdout carries messages alone."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _send(answers, _answer(request["job"], request["arguments"], answers))
    return 0


def _end_with_parent() -> None:
    """Leave when the parent does: it holds the other end of stdin open for as long as it lives."""
    sys.stdin.read()
    os._exit(1)


def _answer(job: str, arguments: Mapping[str, object], answers: TextIO) -> dict[str, object]:
    def tell(text: str) -> None:
        _send(answers, {"progress": text})

    _hand_on_notes(answers)
    try:
        from torchecho.bench.jobs import JOBS  # noqa: PLC0415 - heavy imports come after the parent is being watched

        return {"answer": JOBS[job](tell, **arguments)}
    except EchoError as error:
        # Errors that came through Dynamo are of a class made for the journey, with Dynamo's advice at their end.
        kind = next(k.__name__ for k in type(error).__mro__ if k.__module__ == EchoError.__module__)
        return {"error": str(error).split("\n\n", maxsplit=1)[0], "kind": kind}
    except Exception as error:  # noqa: BLE001 - the last guard of the process: the parent words it in one line
        traceback.print_exc()
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        return {"error": f"{job} failed: {type(error).__name__}: {first_line}", "kind": "EchoError"}


def _hand_on_notes(answers: TextIO) -> None:
    """Turn what torchecho logs and warns of into progress."""

    class Hand(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            _send(answers, {"progress": record.getMessage()})

    logger = logging.getLogger("torchecho")
    logger.setLevel(logging.INFO)
    logger.addHandler(Hand())
    show = warnings.showwarning

    def showwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, EchoWarning):
            _send(answers, {"progress": f"warning: {message}"})
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = showwarning


def _send(answers: TextIO, message: Mapping[str, object]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
