"""Plan a graph for Inductor by what Inductor really allocates, and compile it under that plan."""

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._functorch.compile_utils import fx_graph_cse

from torchecho.apply.dry_run import WorkspaceOf
from torchecho.apply.fx import apply_schedule
from torchecho.apply.inductor import Halves, Watch, compile_inductor, copy_of, default_partition, rehearse
from torchecho.apply.ladder import Ladder, Unrehearsed, choose_rung, describe_rung, make_ladder
from torchecho.cache import cache_folder, locked, read_json, write_json
from torchecho.capture.fx import JointCapture, capture_joint
from torchecho.cost.model import OpCosts
from torchecho.errors import ApplyError
from torchecho.ir.graph import Phase
from torchecho.ir.schedule import Schedule
from torchecho.planner.facts import graph_hash
from torchecho.planner.plan import Plan
from torchecho.planner.planner import make_archive

_logger = logging.getLogger("torchecho")
_KIND = "inductor-peaks/1"

# A pointwise op is generated into the kernel that reads it, so that its repetition moves no bytes of its own.
_FUSED_SHARE = 0.1


@dataclass(frozen=True)
class Request:
    """What to plan for, and how to price and measure.

    Attributes:
        budget: Bytes, or a fraction of the untouched step's peak; None for no budget.
        optimizer_bytes, model_bytes: As in `capture_joint`.
        costs_of: Prices a captured graph.
        workspace_of: Bytes that a call into ATen allocates inside and frees.
        on_plan: Called with the plan and the fixed bytes of its graph before the compiled step is returned.
    """

    budget: int | float | None
    max_slowdown: float | None
    name: str
    optimizer_bytes: int
    model_bytes: int
    costs_of: Callable[[JointCapture], OpCosts]
    workspace_of: WorkspaceOf
    on_plan: Callable[[Plan, int], None]
    watch_forward: Watch
    watch_backward: Watch


def compile_under_plan(module: fx.GraphModule, example_inputs: Sequence[Any], request: Request) -> Callable[..., Any]:
    """Compile a Dynamo graph through Inductor under a plan whose peak was rehearsed.

    The archive of plans is made once. A rung of it is rehearsed until one fits; peaks found before, by any process, are
    read from the cache folder.

    Raises:
        BudgetError: not even the tightest plan fits; the floor is what Inductor really allocates.
    """
    compilation = _Compilation(request, _settings())
    try:
        return compilation.compile(copy_of(module), example_inputs)
    except Unrehearsed:
        compilation.settle(module, example_inputs)
    return compilation.compile(module, example_inputs)


@dataclass
class _Compilation:
    """One graph on its way through Inductor."""

    request: Request
    settings: str
    ladders: dict[str, Ladder] = field(default_factory=dict)

    def compile(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        request = self.request
        asked = (_version(), request.budget, request.max_slowdown, request.optimizer_bytes, request.model_bytes)
        return compile_inductor(
            module,
            example_inputs,
            self.planned,
            digest=f"torchecho {hashlib.sha256(repr(asked).encode()).hexdigest()}",
            watch_forward=request.watch_forward,
            watch_backward=request.watch_backward,
        )

    def planned(self, module: fx.GraphModule, joint_inputs: Any, **arguments: Any) -> Halves:
        """Split by the plan, when all peaks that it takes to choose it are known."""
        if not joint_inputs:
            return default_partition(module, joint_inputs, **arguments)
        capture = self.captured(module, arguments)
        ladder = self.ladder(capture, joint_inputs, arguments)
        index, budget_bytes = self.chosen(ladder)
        plan = describe_rung(ladder, index, budget_bytes, self.request.max_slowdown, name=self.request.name)
        halves = apply_schedule(capture, plan.schedule)
        self.request.on_plan(plan, capture.graph.fixed_bytes)
        return halves

    def captured(self, module: fx.GraphModule, arguments: dict[str, Any]) -> JointCapture:
        """Capture a joint graph after the merging of equal ops that plain ``torch.compile`` would do too."""
        merged = copy_of(module)
        merged.graph.eliminate_dead_code()
        merged.graph = fx_graph_cse(merged.graph)
        return capture_joint(
            merged,
            num_forward_outputs=arguments["num_fwd_outputs"],
            static_indices=arguments.get("static_lifetime_input_indices"),
            base_bytes=self.request.optimizer_bytes,
            model_bytes=self.request.model_bytes,
        )

    def ladder(self, capture: JointCapture, joint_inputs: Any, arguments: dict[str, Any]) -> Ladder:
        key = graph_hash(capture.graph)
        if key not in self.ladders:
            archive = make_archive(capture.graph, fused_costs(capture, self.request.costs_of(capture)))
            known = _read_peaks(self.path(key))
            first = known.first or _untouched_schedule(capture, joint_inputs, arguments)
            self.ladders[key] = make_ladder(archive, first)
            self.ladders[key].peaks.update(known.peaks)
        return self.ladders[key]

    def path(self, key: str) -> Path:
        """Return the file of a graph's rehearsed peaks."""
        digest = hashlib.sha256(f"{key} {self.settings}".encode()).hexdigest()
        return cache_folder() / "inductor" / f"{digest[:24]}.json"

    def chosen(self, ladder: Ladder) -> tuple[int, int | None]:
        """Return the rung to stand on and the budget in bytes."""
        budget = self.request.budget
        budget_bytes = int(budget * ladder.peak_of(0)) if isinstance(budget, float) else budget
        ladder.peak_of(0)
        return (
            choose_rung(ladder.peak_of, ladder.rungs, budget_bytes, self.request.max_slowdown, ladder.seconds),
            budget_bytes,
        )

    def settle(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        """Rehearse rungs until the choice is clear."""
        ((key, ladder),) = self.ladders.items()
        fixed_bytes = ladder.archive.search.graph.fixed_bytes
        while True:
            try:
                self.chosen(ladder)
                return
            except Unrehearsed as missing:
                rung = next(r for r in ladder.rungs if r.digest == str(missing))
                above = rehearse(module, example_inputs, _Fixed(self, key, rung.schedule), self.request.workspace_of)
                ladder.peaks[rung.digest] = fixed_bytes + above
                _logger.info("rehearsed: simulated %d, Inductor %d bytes", rung.simulated_bytes, fixed_bytes + above)
                _write_peaks(self.path(key), _Known(ladder.rungs[0].schedule, ladder.peaks))


@dataclass(frozen=True)
class _Fixed:
    """A partition by one schedule."""

    compilation: _Compilation
    key: str
    schedule: Schedule

    def __call__(self, module: fx.GraphModule, joint_inputs: Any, **arguments: Any) -> Halves:
        if not joint_inputs:
            return default_partition(module, joint_inputs, **arguments)
        capture = self.compilation.captured(module, arguments)
        if graph_hash(capture.graph) != self.key:
            raise ApplyError("Inductor's joint graph came out different when it was traced again")
        return apply_schedule(capture, self.schedule)


def fused_costs(capture: JointCapture, costs: OpCosts) -> OpCosts:
    """Return the costs of ops that are generated together: a pointwise op costs a share of what it costs alone."""
    seconds = [
        s * _FUSED_SHARE if torch.Tag.pointwise in getattr(node.target, "tags", ()) else s
        for s, node in zip(costs.seconds, capture.op_nodes, strict=True)
    ]
    return dataclasses.replace(costs, seconds=tuple(seconds))


def _untouched_schedule(capture: JointCapture, joint_inputs: Any, arguments: dict[str, Any]) -> Schedule | None:
    """Return what plain ``torch.compile`` would run; None when it repeats what may not be repeated."""
    twin = copy_of(capture.module)
    forward, backward = default_partition(twin, joint_inputs, **arguments)
    index_of = {node.name: i for i, node in enumerate(capture.op_nodes)}
    ops = capture.graph.ops
    steps = [
        [
            index_of[n.name]
            for n in half.graph.nodes
            if n.op == "call_function" and n.name in index_of and not ops[index_of[n.name]].is_view
        ]
        for half in (forward, backward)
    ]
    if any(ops[i].phase == Phase.FORWARD and ops[i].keep_reason for i in steps[1]):
        return None
    return Schedule(tuple(steps[0] + steps[1]), len(steps[0]))


@dataclass(frozen=True)
class _Known:
    """What earlier rehearsals of a graph found: its untouched schedule, and peaks by digest."""

    first: Schedule | None = None
    peaks: dict[str, int] = field(default_factory=dict)


def _settings() -> str:
    """Return what rehearsed peaks depend on besides the graph; taken before the settings are patched."""
    from torch._inductor import config

    found = config.get_hash().hex() if hasattr(config, "get_hash") else ""
    return repr((torch.__version__, _version(), found, torch.get_num_threads()))


def _version() -> str:
    try:
        return version("torchecho")
    except PackageNotFoundError:
        return "source"


def _read_peaks(path: Path) -> _Known:
    body = read_json(path, _KIND)
    if body is None:
        return _Known()
    try:
        first = Schedule(tuple(int(i) for i in body["steps"]), int(body["num_forward"]))
        return _Known(first, {str(digest): int(peak) for digest, peak in body["peaks"].items()})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        _logger.warning("ignoring damaged peaks in %s: %r", path, error)
        return _Known()


def _write_peaks(path: Path, known: _Known) -> None:
    assert known.first is not None, "a ladder has a first rung"
    try:
        with locked(path):
            peaks = {**_read_peaks(path).peaks, **known.peaks}
            write_json(path, _KIND, {"steps": known.first.steps, "num_forward": known.first.num_forward, "peaks": peaks})
    except OSError as error:
        _logger.warning("cannot keep rehearsed peaks in %s: %s", path, error)
