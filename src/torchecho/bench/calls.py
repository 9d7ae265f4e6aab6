"""What the eager engine adds to each call of a program, measured on a step of many tiny ops."""

import contextlib
import copy
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from torchecho.api import optimize
from torchecho.apply.policy import KEEP, Policy, kept_as_it_is
from torchecho.apply.tape import Tape, stash, unstash
from torchecho.bench.eager_models import Chain
from torchecho.bench.training import Training, paired_seconds
from torchecho.capture.recording import Recording
from torchecho.capture.tape import Recorder
from torchecho.engine.quiet import Learner, Quiet
from torchecho.meter.step import seconds_of

_ONE_OF = 10

Run = Callable[[], object]


def cost_of_calls(num_ops: int, pairs: int) -> list[Mapping[str, Any]]:
    """Return a row for plain eager PyTorch and for each way in which the engine runs a step.

    Args:
        num_ops: Ops of the forward.
        pairs: Pairs of timed steps, of the way and of plain eager PyTorch.
    """
    model = Chain(num_ops)
    training = Training(model, torch.optim.SGD(model.parameters()), (torch.rand_like(model.weight),))

    def plain() -> object:
        return training.step(model)

    num_calls = len(_calls_of_forward(_record(training)))
    plain()
    plain_seconds = [seconds_of(plain) for _ in range(pairs)]
    rows = [_row("eager", "untouched", plain_seconds, plain_seconds, num_calls)]
    for setting, run in _ways(training):
        seconds, plain_seconds = paired_seconds(run, plain, pairs)
        rows.append(_row("torchecho", setting, seconds, plain_seconds, num_calls))
    return rows


def _ways(training: Training) -> Iterator[tuple[str, Run]]:
    optimized = optimize(copy.copy(training.model), engine="eager", max_slowdown=0)
    for _ in range(2):  # one step to record and plan, one to measure the plan's peak: later ones are left alone
        training.step(optimized)
    yield "optimized, nothing to recompute", lambda: training.step(optimized)
    recording = _record(training)
    nothing, some = _policy(recording, None), _policy(recording, _ONE_OF)
    yield "watched, nothing recomputed", lambda: _follow(training, nothing)
    yield f"watched, one op of {_ONE_OF} recomputed", lambda: _follow(training, some)
    for policy in (nothing, some):
        _learn(training, policy)
    yield "followed, nothing recomputed", lambda: _follow_quietly(training, nothing)
    yield f"followed, one op of {_ONE_OF} recomputed", lambda: _follow_quietly(training, some)
    yield "recorded", lambda: _record(training)


def _policy(recording: Recording, one_of: int | None) -> Policy:
    """Return a policy that recomputes one call of so many, or none."""
    calls = _calls_of_forward(recording)
    return Policy(
        calls=tuple(call.func for call in calls),
        decisions=tuple(
            0 if kept is KEEP and one_of and index % one_of == 0 else kept
            for index, kept in enumerate(kept_as_it_is(call.func) for call in calls)
        ),
        places=tuple(call.place for call in calls if call.place is not None),
    )


def _calls_of_forward(recording: Recording) -> list[Any]:
    return recording.calls[: recording.backward_starts]


def _follow(training: Training, policy: Policy) -> int:
    """Run one step under a policy, all of it watched; return how many ops ran again."""
    tape = Tape(policy)
    return _step(training, tape, _watched(tape))


def _learn(training: Training, policy: Policy) -> None:
    """Run one step under a policy, and learn which of its calls have to do with that."""
    tape = Tape(policy)
    learner = Learner(tape, policy.outline)
    _step(training, tape, _watched(tape), learner)
    learner.end()


def _follow_quietly(training: Training, policy: Policy) -> int:
    """Run one step under a policy whose outline is known; return how many ops ran again."""
    tape = Tape(policy)
    return _step(training, tape, Quiet(tape, (tape.pack, tape.unpack), policy.outline))


@contextlib.contextmanager
def _watched(tape: Tape) -> Iterator[None]:
    with saved_tensors_hooks(tape.pack, tape.unpack), tape:
        yield


def _step(training: Training, tape: Tape, *around: AbstractContextManager[object]) -> int:
    """Run one step whose forward runs inside some contexts; return how many ops ran again."""
    tape.runs_once = True

    def forward(*batch: torch.Tensor) -> torch.Tensor:
        with contextlib.ExitStack() as contexts:
            for context in around:
                contexts.enter_context(context)
            loss: torch.Tensor = training.model(*batch)
        tape.end_forward()
        return loss

    training.step(forward)
    return tape.num_recomputed


def _record(training: Training) -> Recording:
    """Run and record one step."""
    recorder = Recorder(stash, unstash)

    def forward(*batch: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(recorder.pack, recorder.unpack), recorder:
            loss: torch.Tensor = training.model(*batch)
        recorder.start_backward()
        return loss

    loss = forward(*training.batch)
    with recorder:
        loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=True)
    return recorder.finish()


def _row(
    system: str, setting: str, seconds: Sequence[float], plain_seconds: Sequence[float], num_calls: int
) -> Mapping[str, Any]:
    median = statistics.median(seconds)
    ratios = [ours / theirs for ours, theirs in zip(seconds, plain_seconds, strict=True)]
    added = statistics.median(ours - theirs for ours, theirs in zip(seconds, plain_seconds, strict=True)) / num_calls
    figures = {"calls": num_calls, "seconds_per_call": median / num_calls, "added_seconds_per_call": added}
    is_plain = system == "eager"
    return {
        "system": system,
        "setting": setting,
        "engine": None if is_plain else "eager",
        "seconds": list(seconds),
        "seconds_median": median,
        "overhead_measured": None if is_plain else statistics.median(ratios) - 1,
        "nodes": num_calls,
        "figures": figures,
        "note": f"{median / num_calls * 1e6:.2f} us a call"
        + ("" if is_plain else f", {added * 1e6:+.2f} us beside plain eager PyTorch"),
    }
