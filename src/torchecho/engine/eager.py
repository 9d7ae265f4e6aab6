"""The eager engine: plan a step that was recorded as it ran, and run the next ones under the plan.

The first step of a program is planned before the next begins. Steps of other sizes run under the plan of the smallest
known step that is nowhere smaller, which keeps them inside its peak; where that plan is for a much larger step, or
where there is none, the step is recorded while it runs and planned in another process while the next ones run.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import InitVar, dataclass, field

import torch
from torch import nn

from torchecho.apply.policy import FOLLOW, KEEP, WRITE, Policy
from torchecho.capture.recording import Recording
from torchecho.capture.storage import storage_key
from torchecho.capture.tape_graph import TapeCapture, build_graph, step_device
from torchecho.cost.model import OpCosts
from torchecho.cost.scaled import Scaled
from torchecho.engine.later import Later, is_elsewhere, is_held_back
from torchecho.engine.notice import warn
from torchecho.engine.planning import Part, Surroundings, plan_priced, with_budget_in_bytes, with_note
from torchecho.engine.ranks import same_on_every_rank
from torchecho.engine.situation import Situation, closest, largest, situation_of
from torchecho.errors import BudgetError, EchoError, OptionError
from torchecho.meter.pricing import price, price_alike, scaled_costs
from torchecho.meter.probe import probe_available
from torchecho.planner import journal
from torchecho.planner.plan import Plan
from torchecho.planner.search import short_effort
from torchecho.units import format_bytes

_logger = logging.getLogger("torchecho")

_MOST_PLANS = 16
SHORT_SEARCH = "made by a short search; a longer one runs beside the training"
_LITTLE_OVERHEAD = 0.02
_WORTH_A_PLAN = 1.25  # a plan for a step this many times larger recomputes more than need be


@dataclass(frozen=True)
class Planned:
    """A plan for steps of one situation.

    Attributes:
        policy: What it decides at each call.
        floor_policy: What the plan with the smallest peak would: for steps that are larger than any that was planned.
        number: Its place in the journal.
        start_bytes: Bytes that are alive when such a step begins.
    """

    policy: Policy
    floor_policy: Policy
    number: int
    start_bytes: int


@dataclass(frozen=True)
class Choice:
    """How to run a step: under which policy, and whether to record and to measure it.

    Attributes:
        measured: The plan to which a measured peak belongs; None not to measure.
        is_safe: Run it in little memory though there is no plan.
    """

    policy: Policy | None
    records: bool
    measured: Planned | None = None
    is_safe: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether the step simply runs."""
        return self.policy is None and not self.records and self.measured is None


@dataclass(frozen=True)
class _Work:
    """What planning a recording gives, in whatever process it was done."""

    plan: Plan
    calls_of_op: tuple[tuple[int, ...], ...]
    start_bytes: int


@dataclass(eq=False)
class EagerEngine:
    """The plans of one program.

    Attributes:
        plans: By situation; None where planning failed and the step runs untouched.
        has_measured: The peak of a step has been measured.
    """

    surroundings: Surroundings
    of_model: InitVar[nn.Module | None] = None
    plans: dict[Situation, Planned | None] = field(default_factory=dict)
    has_measured: bool = False
    _has_given_up: bool = False
    _has_told: bool = False
    _rehearsed: set[Situation] = field(default_factory=set)
    _known: Scaled | None = None
    _in_bytes: Surroundings = field(init=False)
    _pending: tuple[Situation, Recording, Callable[[], _Work] | Later[_Work]] | None = None
    _model: weakref.ref[nn.Module] | None = field(init=False, default=None)
    _returned: dict[int, weakref.ref[torch.UntypedStorage]] = field(init=False, default_factory=dict)

    def __post_init__(self, of_model: nn.Module | None) -> None:
        # Weakly, so that who keeps an engine for each module does not keep the modules.
        self._in_bytes = self.surroundings  # until a first plan has found what the budget "auto" is
        self._model = None if of_model is None else weakref.ref(of_model)
        probe_available(self.device(()))  # begins to count memory: what is born uncounted dies uncounted too

    @property
    def model(self) -> nn.Module | None:
        """The module whose steps are planned; None for a block of code, and when nobody has the module any more."""
        return None if self._model is None else self._model()

    def situation(self, tensors: Iterable[torch.Tensor]) -> Situation:
        """Return what a step on some tensors starts from."""
        return situation_of(tensors, has_gradients=any(True for _ in self.gradients()))

    def gradients(self) -> Iterable[torch.Tensor]:
        """Yield the gradients that are there."""
        model = self.model
        for parameter in model.parameters() if model is not None else ():
            if parameter.grad is not None:
                yield parameter.grad

    def choose(self, situation: Situation) -> Choice:
        """Return how to run a step."""
        if self._has_given_up:
            return Choice(None, records=False)
        self._collect()
        if situation in self.plans:
            planned = self.plans[situation]
            if planned is None:
                return Choice(None, records=False)
            plan = journal.entry(planned.number)
            if plan.measured_peak_bytes is None:
                return Choice(_if_any(planned.policy), records=False, measured=planned)
            is_wrong = situation in self._rehearsed and plan.measured_peak_bytes > plan.predicted_peak_bytes
            return Choice(_if_any(planned.policy), records=is_wrong and self._pending is None)
        may_record = self._pending is None and len(self.plans) < _MOST_PLANS
        found = closest(situation, self.plans)
        if found is not None:
            at, planned = found
            is_larger = at.volume > _WORTH_A_PLAN * situation.volume
            is_worth_it = is_larger and planned is not None and _recomputes_much(planned)
            return Choice(_if_any(planned.policy) if planned else None, records=may_record and is_worth_it)
        planned = largest(self.plans)
        if planned is None:
            return Choice(None, records=may_record, is_safe=self._has_budget)
        # Where only time was promised, the floor may break the promise; where memory was, anything else may.
        promises_time = self.surroundings.options.memory_budget is None
        policy = planned.policy if promises_time else planned.floor_policy
        return Choice(_if_any(policy), records=may_record)

    def plan_ahead(self, situation: Situation, recording: Recording) -> None:
        """Plan a step that was only rehearsed; where it turns out other than foreseen it is planned anew.

        Raises:
            BudgetError: no plan keeps the step inside the budget.
        """
        with self.surroundings.while_planning(self._name):
            self.plans[situation] = self._take(self._plan_first(recording), recording)
        self._rehearsed.add(situation)

    def learn(self, situation: Situation, recording: Recording) -> None:
        """Plan steps of a situation by a recorded one: at once the first time, later in the background.

        Raises:
            BudgetError: no plan keeps the first recorded step inside the budget.
            EchoError: with ``strict``, anything failed.
        """
        if self._known is not None:
            alike = functools.partial(self._plan_alike, recording, self._known, self._in_bytes)
            self._pending = (situation, recording, alike)
            return
        self.plans[situation] = None
        try:
            with self._guarded(), self.surroundings.while_planning(self._name):
                work, whole = self._plan_quickly(recording)
                self.plans[situation] = self._take(work, recording)
                recording.forget()
                if whole is not None:
                    self._pending = (situation, recording, whole)
        except KeyboardInterrupt:
            del self.plans[situation]  # the next step is planned in its place
            raise

    def give_up(self, reason: str) -> None:
        """Leave all steps untouched from now on.

        Raises:
            EchoError: with ``strict``.
        """
        self._has_given_up, self._pending = True, None
        self.tell_once(reason)

    def tell_once(self, reason: str) -> None:
        """Tell the user, once, why a step runs untouched.

        Raises:
            EchoError: with ``strict``, each time.
        """
        if self.surroundings.options.strict:
            raise EchoError(f"{self._name} cannot be optimized: {reason}")
        if not self._has_told:
            self._has_told = True
            warn(f"{self._name} runs untouched: {reason}")

    def returned(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remember what a step gave to the program."""
        keyed = ((storage_key(tensor), tensor) for tensor in tensors)
        self._returned = {key: weakref.ref(tensor.untyped_storage()) for key, tensor in keyed if key is not None}

    def device(self, tensors: Iterable[torch.Tensor]) -> torch.device:
        """Return the device of a step on some tensors: the first accelerator among them, else that of the model."""
        model = self.model
        parameters = itertools.islice(() if model is None else model.parameters(), 1)
        devices = (tensor.device for tensor in itertools.chain(tensors, parameters))
        return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))

    def left_over_bytes(self, given: Iterable[torch.Tensor]) -> int:
        """Return the bytes of what the program still holds of the step before, apart from what this one is given.

        They are there when the step begins and mostly die in it, when the program gives their names to its results.
        """
        known = {storage_key(tensor) for tensor in given}
        storages = (reference() for key, reference in self._returned.items() if key not in known)
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def measured(self, planned: Planned, peak_bytes: int) -> None:
        """Note the peak of a planned step, and warn when it is over the budget."""
        self.has_measured = True
        plan = journal.amend(planned.number, measured_peak_bytes=peak_bytes)
        if plan.budget_bytes is not None and peak_bytes > plan.budget_bytes:
            is_rehearsed = any(self.plans[situation] is planned for situation in self._rehearsed)
            then = (
                "its rehearsal did less; a real step is planned next" if is_rehearsed else "lower the budget by as much"
            )
            warn(
                f"{plan.name}: measured peak {format_bytes(peak_bytes)} is over the budget"
                f" {format_bytes(plan.budget_bytes)} ({format_bytes(plan.predicted_peak_bytes)} was predicted): {then}"
            )

    def plan_rehearsal(self, recording: Recording) -> Plan:
        """Return the plan of a step that was only rehearsed.

        Raises:
            BudgetError: no plan keeps the step inside the budget.
        """
        plan = self._plan_first(recording).plan
        journal.record(plan)
        return plan

    def _collect(self) -> None:
        """Take up the plan that was made in the background, when it is ready.

        Making it begins with the step after the recorded one: a fork, and the pages that are copied after it, cost
        about as much as recording.
        """
        if self._pending is None or is_held_back():
            return
        situation, recording, later = self._pending
        if not isinstance(later, Later):
            self._pending = (situation, recording, Later(later))
            return
        if not later.is_done():
            return
        self._pending = None
        known = self.plans.get(situation)
        if known is not None and SHORT_SEARCH in journal.entry(known.number).notes:
            self.plans[situation] = self._better_of(known, later, recording)
            return
        self._rehearsed.discard(situation)
        self.plans.setdefault(situation, None)
        with self._guarded():
            work = later.result()
            self.plans[situation] = self._take(work, recording)
            plan = work.plan
            if plan.budget_bytes is not None and plan.predicted_peak_bytes > plan.budget_bytes:
                warn(
                    f"{plan.name}: steps of this size need {format_bytes(plan.predicted_peak_bytes)} at least, more"
                    f" than the budget {format_bytes(plan.budget_bytes)}: make the longest batches smaller"
                )

    def _better_of(self, short: Planned, later: Later[_Work], recording: Recording) -> Planned:
        """Return the plan of a short search, or that of the whole one where it is as good; the journal has it too."""
        plan = journal.entry(short.number)
        plan = dataclasses.replace(plan, notes=tuple(note for note in plan.notes if note != SHORT_SEARCH))
        better = short
        try:
            work = later.result()
        except EchoError as error:
            _logger.info("%s: the longer search ended without a plan: %s", plan.name, error)
        else:
            if _rank(work.plan) <= _rank(plan):
                plan, better = work.plan, _planned(work, recording, short.number)
        journal.replace(short.number, plan)
        return better

    def _plan_first(self, recording: Recording) -> _Work:
        return self._plan_whole(*self._price_first(recording))

    def _plan_quickly(self, recording: Recording) -> tuple[_Work, Callable[[], _Work] | None]:
        """Return a plan for the next step, and what makes a better one where that takes long."""
        capture, costs, surroundings = self._price_first(recording)
        whole = functools.partial(self._plan_whole, capture, costs, surroundings)
        effort = short_effort(capture.graph) if is_elsewhere() else None
        if effort is None:
            return whole(), None
        try:
            work = self._plan_whole(capture, costs, surroundings, effort=effort)
        except BudgetError:  # the whole search may find what keeps to the budget, or what its floor is
            return whole(), None
        return dataclasses.replace(work, plan=with_note(work.plan, SHORT_SEARCH)), whole

    def _price_first(self, recording: Recording) -> tuple[TapeCapture, OpCosts, Surroundings]:
        capture, device = self._graph(recording), step_device(recording)
        costs = price(
            capture.graph,
            capture.call,
            cost=self.surroundings.options.cost,
            device=device,
            may_run=self.surroundings.may_run,
        )
        costs = same_on_every_rank(capture.graph, costs)
        self._known = scaled_costs(capture.graph, costs, device, may_run=self.surroundings.may_run)
        self._in_bytes = with_budget_in_bytes(self.surroundings, device)
        return capture, costs, self._in_bytes

    def _plan_whole(
        self,
        capture: TapeCapture,
        costs: OpCosts,
        surroundings: Surroundings,
        *,
        part: Part | None = None,
        effort: int | None = None,
    ) -> _Work:
        device = step_device(capture.recording)
        if part is None:
            part = Part.SHARED if capture.recording.is_partial else Part.WHOLE
        plan = plan_priced(capture.graph, costs, device, surroundings, name=self._name, part=part, effort=effort)
        return _Work(plan, capture.calls_of_op, capture.start_bytes)

    def _plan_alike(self, recording: Recording, known: Scaled, surroundings: Surroundings) -> _Work:
        """Plan a step of another size; in a forked process, which may not ask a CUDA device anything."""
        capture, device = self._graph(recording), step_device(recording)
        costs = price_alike(capture.graph, known, cost=surroundings.options.cost, device=device)
        return self._plan_whole(capture, costs, surroundings, part=Part.OF_OTHER_SIZE)

    def _graph(self, recording: Recording) -> TapeCapture:
        optimizer = self.surroundings.optimizer
        return build_graph(
            recording,
            base_bytes=optimizer.state_bytes,
            model_bytes=self.surroundings.model_bytes,
            state_bytes=optimizer.present_bytes,
        )

    def _take(self, work: _Work, recording: Recording) -> Planned:
        number = journal.record(work.plan)
        if self.surroundings.on_plan is not None:
            self.surroundings.on_plan(number)
        _logger.info("%s: peak %s predicted", work.plan.name, format_bytes(work.plan.predicted_peak_bytes))
        return _planned(work, recording, number)

    @property
    def _has_budget(self) -> bool:
        """Whether the budget is known before the first plan: it is no fraction of an untouched peak."""
        return isinstance(self.surroundings.options.memory_budget, (int, str))

    @property
    def budget_bytes(self) -> int | None:
        """The budget, where the user gave it in bytes."""
        budget = self.surroundings.options.memory_budget
        return budget if isinstance(budget, int) else None

    @property
    def _name(self) -> str:
        return self.surroundings.name or "step"

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Let what fails inside be a warning, unless the user must know or wants to."""
        try:
            yield
        except (BudgetError, OptionError):
            raise
        except Exception as error:  # whatever fails in here must not break the training
            if self.surroundings.options.strict:
                raise EchoError(f"planning {self._name} failed: {error}") from error
            warn(f"{self._name} runs untouched: planning it failed with {type(error).__name__}: {error}")


def _planned(work: _Work, recording: Recording, number: int) -> Planned:
    policy = policy_of(work.plan.reuse_windows, work, recording)
    return Planned(policy, policy_of(work.plan.floor_windows, work, recording), number, work.start_bytes)


def _rank(plan: Plan) -> tuple[float, float]:
    """Return what makes one plan for a step better than another: time under a budget, else memory."""
    if plan.budget_bytes is None:
        return plan.predicted_peak_bytes, plan.overhead
    return plan.overhead, plan.predicted_peak_bytes


def policy_of(windows: Iterable[tuple[int, int]], work: _Work, recording: Recording) -> Policy:
    """Return what to do at each call of the forward: the windows are those of the ops to recompute."""
    calls = recording.forward_calls
    decisions = [WRITE if func._schema.is_mutable else KEEP for func in calls]  # noqa: SLF001 - no public way
    for op, window in windows:
        first, *rest = work.calls_of_op[op]
        decisions[first] = window
        for position in rest:
            decisions[position] = FOLLOW
    return Policy(
        calls=tuple(calls),
        decisions=tuple(decisions),
        places=tuple(recording.forward_places),
    )


def _recomputes_much(planned: Planned) -> bool:
    """Return whether steps under a plan take so much longer that a plan of their own is worth being recorded."""
    return planned.policy.recomputes and journal.entry(planned.number).overhead > _LITTLE_OVERHEAD


def _if_any(policy: Policy) -> Policy | None:
    return policy if policy.recomputes else None
