"""The eager engine: plan a step that was recorded as it ran, and run the next ones under the plan.

The first step of a program is planned before the next begins. Steps of other sizes run under the plan of the smallest
known step that is nowhere smaller, which keeps them inside its peak, and recompute less of it as far as the budget is
known to leave room. Where there is no such plan, they follow that of the largest step; one that is much larger, or over
the budget, is recorded while it runs and planned in another process while the next ones run.
"""

import contextlib
import dataclasses
import itertools
import logging
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import InitVar, dataclass, field

import torch
from torch import nn

from torchecho.capture.recording import Recording
from torchecho.capture.storage import storage_key
from torchecho.devices import device_among
from torchecho.engine import overrun
from torchecho.engine.choice import Choice, Planned, unless_idle
from torchecho.engine.draft import NOTHING_LEFT_OVER, Draft, Drafter
from torchecho.engine.later import Later, is_elsewhere, is_held_back
from torchecho.engine.notice import warn
from torchecho.engine.planning import Surroundings
from torchecho.engine.situation import Situation, closest, largest, situation_of
from torchecho.errors import BudgetError, EchoError, OptionError
from torchecho.meter.capacity import available_cores
from torchecho.meter.probe import probe_available
from torchecho.planner import journal
from torchecho.planner.plan import Plan
from torchecho.planner.request import with_note
from torchecho.planner.search import short_effort
from torchecho.units import format_bytes

_logger = logging.getLogger("torchecho")

_MOST_PLANS = 16
_MUCH_LARGER = 1.25  # a step this many times larger than any that was planned gets a plan of its own
_DELAY_SECONDS = 0.04  # of a step by planning beside it
_MOST_SHARE = 0.25  # of a core; with more, training threads wait most of the time
SHORT_SEARCH = "made by a short search; a longer one runs beside the training"


@dataclass(eq=False)
class EagerEngine:
    """The plans of one program.

    Attributes:
        plans: By situation; None where planning failed and the step runs untouched.
    """

    surroundings: Surroundings
    of_model: InitVar[nn.Module | None] = None
    plans: dict[Situation, Planned | None] = field(default_factory=dict)
    _refused: dict[Situation, EchoError] = field(default_factory=dict)
    _has_given_up: bool = False
    _has_told: bool = False
    _rehearsed: set[Situation] = field(default_factory=set)
    _drafter: Drafter = field(init=False)
    _pending: tuple[Situation, Draft, Later[Plan]] | None = None
    _model: weakref.ref[nn.Module] | None = field(init=False, default=None)
    _returned: dict[int, weakref.ref[torch.UntypedStorage]] = field(init=False, default_factory=dict)

    def __post_init__(self, of_model: nn.Module | None) -> None:
        self._drafter = Drafter(self.surroundings, self._name)
        # Weakly, so that who keeps an engine for each module does not keep the modules.
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
        """Yield the gradients that are there; what stands in for a parameter in `functional_call` is no leaf."""
        model = self.model
        for parameter in model.parameters() if model is not None else ():
            if parameter.is_leaf and parameter.grad is not None:
                yield parameter.grad

    def choose(self, situation: Situation) -> Choice:
        """Return how to run a step.

        Raises:
            EchoError: an earlier step that was nowhere larger has raised it: the program may have caught it then.
        """
        for refused, error in self._refused.items():
            if situation.covers(refused):
                raise type(error)(str(error))
        if self._has_given_up:
            return Choice(None, records=False)
        self._collect()
        found = closest(situation, self.plans)
        if found is None:
            return self._choose_for_new(situation)
        at, planned = found
        if planned is None:
            return Choice(None, records=False)
        return (
            self._choose_for_planned(situation, planned)
            if at == situation
            else planned.for_other_size(planned.sizes, situation)
        )

    def _choose_for_planned(self, situation: Situation, planned: Planned) -> Choice:
        """Return how to run a step that was planned itself."""
        plan, policy = journal.entry(planned.number), unless_idle(planned.sizes.policy)
        if plan.measured_peak_bytes is None:
            return Choice(policy, records=False, measured=planned)
        is_wrong = situation in self._rehearsed and plan.measured_peak_bytes > plan.predicted_peak_bytes
        return Choice(policy, records=is_wrong and self._pending is None)

    def _choose_for_new(self, situation: Situation) -> Choice:
        """Return how to run a step that is somewhere larger than any that was planned."""
        may_record = self._pending is None and len(self.plans) < _MOST_PLANS
        alike = {at: planned for at, planned in self.plans.items() if at.is_like(situation)}
        at, planned = largest(alike) or largest(self.plans) or (situation, None)
        if planned is None:
            return Choice(None, records=may_record, is_safe=self._has_budget)
        # Where only time was promised, the floor may break the promise; where memory was, anything else may.
        promises_time = self.surroundings.options.memory_budget is None
        sizes = planned.sizes if promises_time else planned.floor
        is_much_larger = situation.volume > _MUCH_LARGER * at.volume
        # A step of another kind begins with other bytes than the plan knows of, so weighing would tell nothing.
        if not alike or (may_record and (is_much_larger or sizes.is_too_large(situation))):
            return Choice(unless_idle(sizes.policy), records=may_record)
        return planned.for_other_size(sizes, situation)

    def plan_ahead(self, situation: Situation, recording: Recording) -> None:
        """Plan a step that was only rehearsed; where it turns out other than foreseen it is planned anew.

        Raises:
            BudgetError: no plan keeps the step inside the budget.
        """
        with self.surroundings.while_planning(self._name):
            draft = self._drafter.first(recording)
            self._take(situation, draft, draft.plan())
        self._rehearsed.add(situation)

    def learn(self, situation: Situation, recording: Recording) -> None:
        """Plan steps of a situation by a recorded one: at once the first time or after a refusal, else beside training.

        Raises:
            BudgetError: no plan keeps the first recorded step inside the budget.
            EchoError: with ``strict``, anything failed.
        """
        self.plans[situation] = None
        try:
            with self._guarded():
                if self._refused or not self._drafter.knows_costs:
                    self._learn_first(situation, recording)
                else:
                    draft = self._drafter.alike(recording)
                    self._pending = (situation, draft, _later(draft))
                    del self.plans[situation]
        except KeyboardInterrupt:
            self.plans.pop(situation, None)  # the next step is planned in its place
            raise
        except EchoError as error:
            del self.plans[situation]
            self._refused[situation] = error
            if self.surroundings.on_refusal is not None:
                self.surroundings.on_refusal(error)
            raise

    def _learn_first(self, situation: Situation, recording: Recording) -> None:
        """Plan by a short search where the whole one takes long and can be made elsewhere."""
        with self.surroundings.while_planning(self._name):
            draft = self._drafter.first(recording)
            try:
                self._plan_first(situation, draft)
            except BudgetError:
                lighter = draft.without_left_over()
                if lighter is None:
                    raise
                self._plan_first(situation, lighter)

    def _plan_first(self, situation: Situation, draft: Draft) -> None:
        effort = short_effort(draft.graph) if is_elsewhere() else None
        try:
            plan = draft.plan(effort)
        except BudgetError:  # the whole search may find what keeps to the budget, or what its floor is
            if effort is None:
                raise
            plan, effort = draft.plan(), None
        if effort is not None:
            plan = with_note(plan, SHORT_SEARCH)
            self._pending = (situation, draft, _later(draft))
        self._take(situation, draft, plan)

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
        return device_among(devices)

    def left_over_bytes(self, given: Iterable[torch.Tensor]) -> int:
        """Return the bytes of what the program still holds of the step before, apart from what this one is given.

        They are there when the step begins and mostly die in it, when the program gives their names to its results.
        """
        known = {storage_key(tensor) for tensor in given}
        storages = (reference() for key, reference in self._returned.items() if key not in known)
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def measured(self, planned: Planned, peak_bytes: int) -> None:
        """Note the peak of a planned step, and warn when it is over the budget."""
        plan = journal.amend(planned.number, measured_peak_bytes=peak_bytes)
        then = "lower the budget by as much"
        if any(self.plans.get(situation) is planned for situation in self._rehearsed):
            then = "its rehearsal did less; a real step is planned next"
        elif NOTHING_LEFT_OVER in plan.notes:
            then = f"{NOTHING_LEFT_OVER} (`del`); else raise the budget to {format_bytes(peak_bytes)}"
        overrun.tell_of_step(plan, peak_bytes, then)

    def measured_first(self, situation: Situation, peak_bytes: int, *, of_all: bool) -> None:
        """Warn when the first step, which ran before there was a plan, was over the budget.

        Args:
            situation: What it started from.
            peak_bytes: Its peak.
            of_all: Of all that is alive, not only of what was allocated in the step.
        """
        planned = self.plans.get(situation)
        if planned is not None:
            start_bytes = 0 if of_all else planned.start_bytes
            plan, ahead = journal.entry(planned.number), self.surroundings.ahead
            overrun.tell_of_first_step(plan, start_bytes + peak_bytes, ahead)

    def plan_rehearsal(self, recording: Recording) -> Plan:
        """Return the plan of a step that was only rehearsed.

        Raises:
            BudgetError: no plan keeps the step inside the budget.
        """
        plan = self._drafter.first(recording).plan()
        journal.record(plan)
        return plan

    def _collect(self) -> None:
        """Take up the plan that was made elsewhere, when it is ready."""
        if self._pending is None or is_held_back() or not self._pending[2].is_done():
            return
        (situation, draft, later), self._pending = self._pending, None
        known = self.plans.get(situation)
        if known is not None and SHORT_SEARCH in journal.entry(known.number).notes:
            self.plans[situation] = self._better_of(known, later, draft)
            return
        self._rehearsed.discard(situation)
        self.plans.setdefault(situation, None)
        with self._guarded():
            plan = draft.noted(later.result())
            self._take(situation, draft, plan)
            overrun.tell_of_plan(plan)

    def _better_of(self, short: Planned, later: Later[Plan], draft: Draft) -> Planned:
        """Return the plan of a short search, or that of the whole one where it is as good; the journal has it too."""
        plan = journal.entry(short.number)
        plan = dataclasses.replace(plan, notes=tuple(note for note in plan.notes if note != SHORT_SEARCH))
        better = short
        try:
            whole = draft.noted(later.result())
        except EchoError as error:
            _logger.info("%s: the longer search ended without a plan: %s", plan.name, error)
        else:
            if _rank(whole) <= _rank(plan):
                plan, better = whole, Planned.of(draft, whole, short.number, short.given_bytes)
        journal.replace(short.number, plan)
        return better

    def _take(self, situation: Situation, draft: Draft, plan: Plan) -> None:
        number = journal.record(plan)
        if self.surroundings.on_plan is not None:
            self.surroundings.on_plan(number)
        _logger.info("%s: peak %s predicted", plan.name, format_bytes(plan.predicted_peak_bytes))
        self.plans[situation] = Planned.of(draft, plan, number, situation.size_bytes)

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


def _later(draft: Draft) -> Later[Plan]:
    """Plan elsewhere: on a core of its own, or where all of them train, so slowly that no step is delayed by much.

    A training thread that has to wait keeps all the others waiting, so a share of a core delays a step by that share.
    """
    has_core = (available_cores() or 1) > torch.get_num_threads()
    step_seconds = sum(draft.costs.seconds)
    return Later(draft.task(), share=1.0 if has_core else min(_MOST_SHARE, _DELAY_SECONDS / max(step_seconds, 1e-9)))


def _rank(plan: Plan) -> tuple[float, float]:
    """Return what makes one plan for a step better than another: time under a budget, else memory."""
    if plan.budget_bytes is None:
        return plan.predicted_peak_bytes, plan.overhead
    return plan.overhead, plan.predicted_peak_bytes
