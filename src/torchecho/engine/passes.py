"""One pass: a forward and its backward, recorded, run under a plan, or both.

A pass opens when a door calls the program and stays open until the backward that follows, so that a loss outside the
module belongs to it. One pass is open in a thread at a time; a door that is entered meanwhile joins it.
"""

import contextlib
import dataclasses
import functools
import gc
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from torchecho.apply.safe import SafeTape
from torchecho.apply.scales import Scales
from torchecho.apply.tape import Tape, stash, unstash
from torchecho.apply.write_watch import WriteWatch
from torchecho.capture.storage import storage_key
from torchecho.capture.tape import Pack, Recorder, Unpack
from torchecho.capture.unseen import grown_bytes
from torchecho.engine import boundaries, later, scope
from torchecho.engine.choice import Choice
from torchecho.engine.eager import EagerEngine
from torchecho.engine.modules import ModulePath, buffers_of
from torchecho.engine.nodes import reachable
from torchecho.engine.quiet import Learner, Quiet, learner_for
from torchecho.engine.situation import Situation
from torchecho.engine.unwatched import UnwatchedNodes
from torchecho.meter import allocator
from torchecho.meter.probe import PeakProbe, counter_of, probe_available

_PLAIN = (torch.Tensor, torch.nn.Module, type)


class _Token:
    """Lives as long as the autograd graphs that it was given to."""


class Pass:
    """A forward and its backward.

    Args:
        engine: Whose plan to follow, and who learns from what is recorded.
        situation: What the step starts from.
        choice: How to run it.
        given: Tensors that the program is given.

    Attributes:
        is_in_call: A call that the pass knows of is running: a backward now is part of it.
    """

    def __init__(
        self, engine: EagerEngine, situation: Situation, choice: Choice, given: Sequence[torch.Tensor]
    ) -> None:
        self._engine, self._situation, self._choice = engine, situation, choice
        keep: Pack = stash
        give: Unpack = unstash
        outer = scope.outer_hooks()
        if outer is not None:
            keep, give = outer  # what no recipe stands for is kept as the program around the door wants it
        self._device = engine.device(given)
        is_counted = choice.measured is not None or choice.records
        self._probe = PeakProbe(self._device) if is_counted and probe_available(self._device) else None
        self._tape: Tape | None = None
        self._scales: Scales | None = None
        if choice.is_safe:
            self._tape = SafeTape(given, keep, give, budget_bytes=engine.budget_bytes)
        elif choice.policy is not None:
            if choice.learns is not None and self._probe is not None:
                self._scales = Scales(functools.partial(self._next_peak, self._probe))
            self._tape = Tape(choice.policy, keep, give, scales=self._scales)
        if self._tape is not None:
            keep, give = self._tape.pack, self._tape.unpack
        self._path = ModulePath(engine.model if choice.records else None)
        self._recorder: Recorder | None = None
        if choice.records:
            self._recorder = Recorder(keep, give, self._path.current)
            keep, give = self._recorder.pack, self._recorder.unpack
        self._hooks = (keep, give)
        self._unwatched: UnwatchedNodes | None = None
        self._modes = [mode for mode in (self._tape, self._recorder) if mode is not None]
        self._calls: Learner | Quiet | None = None
        self._writes: WriteWatch | None = None
        self._ends_with_call = scope.num_modes() > 0
        self._has_run_backward = self._keeps_graph = self._is_in_backward = False
        self._graph: weakref.ref[_Token] | None = None
        self._given = given
        self.is_in_call = self._pauses_collector = False
        self._uncounted: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._start_bytes = self._zero_bytes = 0
        self._peak_bytes: int | None = None

    def open(self) -> None:
        """Begin: from here on what the program does belongs to the pass."""
        if self._recorder is not None:
            self._path.start()
            self._know_sources(self._recorder)
        if self._probe is not None:
            self._start_probe(self._probe)
        self._given = ()
        if self._modes:
            scope.hide_from_dynamo()
            scope.push_hooks(self._hooks)
        for mode in self._modes:
            scope.push_mode(mode)
        boundaries.listen(self)

    def _know_sources(self, recorder: Recorder) -> None:
        """Tell the recorder what is there, and remember what was born before anybody counted."""
        sources, buffers = (*self._given, *self._engine.gradients()), buffers_of(self._engine.model)
        recorder.know_sources(sources)
        recorder.know_buffers(buffers)
        if self._probe is None or self._device.type != "cpu":
            return
        for tensor in (*sources, *buffers):
            key = storage_key(tensor)
            storage = None if key is None else tensor.untyped_storage()
            if key is not None and storage is not None and allocator.counted_bytes(storage.data_ptr()) is None:
                self._uncounted[key] = weakref.ref(storage), storage.nbytes()

    def _start_probe(self, probe: PeakProbe) -> None:
        # Of a CUDA device all that is live counts, of the CPU what belongs to the step.
        is_all = self._device.type == "cuda"
        if self._choice.measured is None:
            probe.start()
            self._start_bytes = probe.start_bytes if is_all else 0
            return
        # Cyclic garbage of earlier steps that died during this one would count as freed by it: what is young goes now,
        # and the rest stays until the step is over.
        gc.collect(1)
        left_over_bytes = self._engine.left_over_bytes(self._given)
        probe.start()
        measured = self._choice.measured
        larger_bytes = max(0, self._situation.size_bytes - measured.given_bytes)
        self._start_bytes = probe.start_bytes if is_all else measured.start_bytes + left_over_bytes + larger_bytes
        self._zero_bytes = probe.start_bytes

    def _next_peak(self, probe: PeakProbe) -> int:
        """Return the peak since this was last asked, or since the beginning."""
        peak_bytes = probe.start_bytes + probe.read() - self._zero_bytes + self._start_bytes
        probe.start()
        return peak_bytes

    @property
    def is_open(self) -> bool:
        """Whether the pass still waits for its backward."""
        return boundaries.listener() is self

    def is_waiting(self) -> bool:
        """Return whether a backward may still follow: somebody holds the autograd graph."""
        return not self._has_run_backward and (self._graph is None or self._graph() is not None)

    def call_begins(self) -> None:
        """Take note that a module's call begins: a backward inside it, such as a gradient penalty, is part of it."""
        self.is_in_call = True
        self._pause_collector()
        self._see_calls()

    def _see_calls(self) -> None:
        """Learn what the program calls under a policy, or watch only where that has to do with the policy."""
        policy = self._choice.policy
        if self._tape is None or policy is None or self._recorder is not None or self._ends_with_call:
            return
        if scope.has_compiled():
            return
        if policy.outline.calls:
            self._stop_watching()
            self._calls = Quiet(self._tape, self._hooks, policy.outline)
        else:
            self._calls = learner_for(policy, self._tape, self._engine.model)
        if self._calls is not None:
            scope.push_function_mode(self._calls)

    def _call_is_seen(self) -> None:
        """Watch everything again: the loss outside the module is no call that was learned."""
        calls, self._calls = self._calls, None
        if calls is None:
            return
        scope.remove_function_mode(calls)
        if self.is_open:
            calls.end()

    @contextlib.contextmanager
    def inside_a_call(self) -> Iterator[None]:
        """Take note of a call that the pass takes in; what it returns belongs to the program."""
        self.is_in_call = True
        try:
            yield
        finally:
            self.is_in_call = False

    def call_ended(self, made: Any) -> None:
        """Take note that a module's call has returned: what follows until the backward still belongs to the pass."""
        self.is_in_call = False
        self._resume_collector()
        self._call_is_seen()
        token = _Token()
        tensors = _tensors_of(made)
        self._engine.returned(tensors)
        if self._recorder is not None:
            self._recorder.know_returned(tensors)
        for tensor in tensors:
            if tensor.grad_fn is not None:
                metadata: Any = tensor.grad_fn.metadata  # a property that torch annotates as a method
                metadata[_Token] = token
        self._graph = weakref.ref(token, self._graph_died)
        if self._ends_with_call:
            self._leave()

    def block_ended(self) -> None:
        """Take note that a block of code has ended: only the backward still belongs to the pass."""
        self._leave()

    def _graph_died(self, token: "weakref.ref[_Token]") -> None:
        """End the pass when nobody holds what its backward would begin with."""
        if token is self._graph and not self._is_in_backward and not self._has_run_backward:
            self.close()

    def before_backward(self, *, keeps_graph: bool, roots: Sequence[Node]) -> None:
        """Stop following the forward; a recorded pass records the backward too."""
        if self.is_in_call:
            return
        self._leave()
        self._pause_collector()
        self._keeps_graph, self._is_in_backward = keeps_graph, True
        if self._tape is not None:
            self._tape.start_backward(keeps_graph=keeps_graph)
        if self._recorder is not None:
            if not self._has_run_backward:
                self._note_unseen(self._recorder)
            self._recorder.start_backward()
            self._unwatched = UnwatchedNodes(self._recorder, list(reachable(roots)), self._device)
            scope.push_mode(self._recorder)

    def hooks_refused(self) -> None:
        """Give up: what the program does now (a transform of `torch.func`) does not allow the hooks of a pass."""
        if self._modes:
            self.close()
            self._engine.give_up("what it calls disables saved-tensor hooks, as transforms of torch.func do")

    def allocated(self, tensor: torch.Tensor) -> None:
        """Record what was made outside of all calls, such as the random state that a checkpoint keeps."""
        if self._recorder is not None:
            self._recorder.know_apart(tensor)

    def after_backward(self, *, succeeded: bool) -> None:
        """End the pass, unless another backward of the same graph is to follow."""
        if self.is_in_call:
            return
        self._is_in_backward = False
        if self._unwatched is not None:
            self._unwatched.remove()
        if not succeeded:
            self.close()
            return
        self._has_run_backward = True
        if self._scales is not None:
            self._scales.end()
        elif (self._choice.measured is not None or self._choice.is_safe) and self._probe is not None:
            self._peak_bytes = self._start_bytes + self._probe.read()
        if self._keeps_graph or any(one.is_saving() for one in (self._recorder, self._tape) if one is not None):
            self._resume_collector()
            self._leave()
            if self._tape is not None and self._tape.is_saving() and not self._ends_with_call:
                self._watch_writes(self._tape)
        else:
            self.finish()  # with the collector still paused: it would walk over the recording before it is read

    def _watch_writes(self, tape: Tape) -> None:
        """Until the next backward, or until none can come, see what the program changes: an optimizer may step."""
        tape.end_backward()
        self._writes = WriteWatch(tape)
        scope.push_mode(self._writes)
        no_other_comes = weakref.WeakMethod(self._no_other_backward_comes)
        tape.tell_when_nothing_is_saved(lambda: (tell := no_other_comes()) and tell())

    def _no_other_backward_comes(self) -> None:
        if self._is_in_backward or not self.is_open:
            return
        if self._recorder is None:
            self.finish()
        else:
            self._stop_watching()  # what it has recorded is learned from at the next door: this is no place to plan

    def finish(self) -> None:
        """End the pass and learn from it; without a backward there is nothing to learn."""
        self._end()
        try:
            if self._has_run_backward and self._recorder is not None:
                self._pause_collector()
                recording = self._recorder.finish()
                recording.has_recipes = self._tape is not None
                if self._device.type == "cuda":
                    recording.live_bytes = counter_of(self._device).live_bytes()
                self._engine.learn(self._situation, recording)
        finally:
            self._resume_collector()
        if self._has_run_backward:
            self._learn_peak()

    def _learn_peak(self) -> None:
        """Let what was measured be known.

        A step that another backward is to follow is not weighed: what it will ask for is not known yet.
        """
        choice = self._choice
        if self._peak_bytes is not None and choice.measured is not None:
            self._engine.measured(choice.measured, self._peak_bytes)
        elif self._peak_bytes is not None:
            self._engine.measured_first(self._situation, self._peak_bytes, of_all=self._device.type == "cuda")
        elif self._scales is not None and self._tape is not None:
            assert choice.policy is not None, "only a step that follows a policy is weighed"
            assert choice.learns is not None, "who learns wanted the step weighed"
            if self._scales.is_sound and not self._tape.is_saving():
                choice.learns.learn(self._situation, choice.policy, self._scales)

    def close(self) -> None:
        """End the pass; what it kept stays good for a backward that comes later all the same."""
        self._resume_collector()
        self._end()

    def _end(self) -> None:
        self._leave()
        self._probe = None
        boundaries.stop_listening(self)

    def _leave(self) -> None:
        self._path.stop()
        if self._tape is not None:
            self._tape.end_forward()
        if self._calls is not None:  # the call has raised
            scope.remove_function_mode(self._calls)
        self._stop_watching()

    def _stop_watching(self) -> None:
        if self._writes is not None:
            scope.remove_mode(self._writes)
            self._writes = None
        for mode in self._modes:
            scope.remove_mode(mode)
        if self._modes:
            scope.remove_hooks(self._hooks)

    def _note_unseen(self, recorder: Recorder) -> None:
        """Find out what the forward has allocated outside of calls, such as the generator states of checkpoints."""
        has_copies = self._tape is not None and self._tape.num_recomputed  # of which the recorder does not know
        if self._probe is not None and self._device.type == "cpu" and not has_copies:
            recording = recorder.recording
            freed_uncounted_bytes = sum(num_bytes for alive, num_bytes in self._uncounted.values() if alive() is None)
            known_bytes = grown_bytes(recording.log) + freed_uncounted_bytes
            recording.unseen_bytes = max(0, self._probe.kept_bytes - known_bytes)

    def _pause_collector(self) -> None:
        """Keep the garbage collector from walking over a growing recording, and from changing what is measured."""
        if (self._recorder is not None or self._probe is not None) and gc.isenabled():
            gc.disable()
            self._pauses_collector = True

    def _resume_collector(self) -> None:
        if self._pauses_collector:
            gc.enable()
            self._pauses_collector = False


def _tensors_of(made: Any) -> list[torch.Tensor]:
    """Return the tensors that a model has returned, also in an object of the program's own."""
    leaves = tree_leaves(made)
    owned = [tree_leaves(vars(leaf)) for leaf in leaves if hasattr(leaf, "__dict__") and not isinstance(leaf, _PLAIN)]
    return [leaf for leaf in itertools.chain(leaves, *owned) if isinstance(leaf, torch.Tensor)]


def begin(engine: EagerEngine, tensors: Sequence[torch.Tensor], *, is_always: bool = False) -> Pass | None:
    """Open the pass of a step on some tensors; None when it runs untouched and there is nothing to learn.

    Args:
        engine: Holds the plans of the program.
        tensors: What the step is given.
        is_always: Open a pass that does nothing, too, so that doors entered before its backward know of it.
    """
    situation = engine.situation(tensors)
    choice = engine.choose(situation)
    if later.is_held_back():
        choice = dataclasses.replace(choice, records=False, measured=None)
    if choice.is_idle and not is_always:
        return None
    if not choice.is_idle and not scope.hooks_are_allowed():
        engine.tell_once("it is called where saved-tensor hooks are disabled, as inside transforms of torch.func")
        return None
    opened = Pass(engine, situation, choice, tensors)
    opened.open()
    return opened
