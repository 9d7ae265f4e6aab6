"""Record the calls that Inductor's generated code makes, on tensors without bytes.

The Python code that Inductor generates allocates buffers, calls compiled kernels and ATen, and frees in plain sight.
Run under a fake mode with kernels that only note their arguments, it leaves a tape: which call reads, writes and makes
which storage, and the text that makes the same call again. No kernel is compiled or run for it.

Not covered, with a `CaptureError`: kernels other than those of the C++ backend, sizes that are symbols, code whose
course depends on values.
"""

import contextlib
import hashlib
import math
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchecho.capture.kernel_tape import Entry, GeneratedHalf, Tape, TapeStorage
from torchecho.capture.rules import keep_reason_of_call
from torchecho.capture.schema import written_tensors
from torchecho.capture.stash_modes import Modes, is_open, output_of_layer, with_mode
from torchecho.errors import CaptureError

_ALLOCATOR = re.compile(r"empty_strided_(cpu|cpu_pinned|cuda|xpu|mtia)")
_SOURCE_NODES = re.compile(r"Source Nodes: \[([^\]]*)\]")
_PLAIN = (int, bool, str, type(None))


def record(forward: GeneratedHalf, backward: GeneratedHalf, modes: Modes = ()) -> Tape:
    """Return the tape of a forward and a backward run.

    Args:
        forward: Its outputs are those of the user, then those that are saved for backward.
        backward: Takes saved values by the names that the forward gave them; what has another name is a tangent.
        modes: The stash modes of the recurrent layers that have a choice, in the order of their calls; those that are
            left out stay as they were compiled.

    Raises:
        CaptureError: the code holds something that cannot be recorded.
    """
    recorder = _Recorder(modes)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), recorder:
        given = [recorder.given(n, v) for n, v in zip(forward.input_names, forward.inputs, strict=True)]
        outputs = recorder.run(forward, "f", given)
        for value, place in zip(outputs, forward.places, strict=True):
            recorder.put(value, place)
        known = {**dict(zip(forward.input_names, given, strict=True))}
        known.update(zip(forward.output_names, outputs, strict=True))
        names = zip(backward.input_names, backward.inputs, strict=True)
        arguments = [known[n] if n in known else recorder.given(n, v) for n, v in names]
        gradients = recorder.run(backward, "b", arguments)
        tape = recorder.tape
        tape.forward_inputs = [recorder.storage_of(v) for v in given]
        tape.forward_outputs = [(recorder.text(v), recorder.storage_of(v)) for v in outputs]
        tape.backward_inputs = [recorder.storage_of(v) for v in arguments]
        tape.backward_outputs = [(recorder.text(v), recorder.storage_of(v)) for v in gradients]
    return tape


@dataclass(frozen=True)
class _Call:
    """A call as it is made; `name` is what the text calls the function."""

    label: str
    function: Callable[..., Any]
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    keep_reason: str = ""
    digest: str = ""


class _Kernel:
    """Stands for a compiled kernel of the C++ backend while code is recorded."""

    def __init__(self, argument_types: Sequence[str], source: str) -> None:
        # Threads that add to one place do it in whichever order they come.
        self.keep_reason = "sums in an order that varies between threads" if "atomic_add" in source else ""
        self.digest = hashlib.sha256(source.encode()).hexdigest()[:12]
        self.written = tuple(i for i, kind in enumerate(argument_types) if kind.endswith("*") and "const" not in kind)


class _KernelsOnly:
    """Stands for Inductor's ``AsyncCompile`` while code is recorded: nothing is compiled."""

    def cpp_pybinding(self, argument_types: Sequence[str], source: str) -> _Kernel:
        """Return a stand-in for a kernel of the C++ backend."""
        return _Kernel(argument_types, source)

    def wait(self, scope: dict[str, Any]) -> None:
        """Do nothing: there is nothing to wait for."""

    def __getattr__(self, name: str) -> Any:
        """Refuse every other kind of kernel."""
        raise CaptureError(f"generated code with kernels of kind {name!r} cannot be recorded")


class _Recorder(TorchDispatchMode):
    """Notes every call of the code that runs while it is on."""

    def __init__(self, modes: Modes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.tape = Tape()
        self._modes = list(modes)
        self._mode_of_output: dict[int, str] = {}
        self._half: GeneratedHalf | None = None
        self._prefix = ""
        self._lines: list[str] = []
        self._is_quiet = False
        self._reinterpret: Callable[..., torch.Tensor] = torch.as_strided
        self._index_of: dict[int, int] = {}
        self._look: dict[int, str] = {}
        self._alive: list[torch.Tensor] = []  # looks are found by id: no fake tensor may die

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        mode = self._mode_of(func, args)
        args = args if mode is None else with_mode(func, args, mode)
        made = func(*args, **kwargs)
        if mode is not None and isinstance(made, (tuple, list)):
            self._mode_of_output.setdefault(_storage_key(made[0]), mode)
        if not self._is_quiet:
            written = written_tensors(func, args, kwargs)
            call = _Call(str(func), func, self._named(func), args, kwargs, _why_kept(func, args, kwargs))
            self._note(call, made, written)
        return made

    def _mode_of(self, func: Any, args: Sequence[Any]) -> str | None:
        """Return the stash mode that a call of a recurrent layer, or of its backward, is to have; None for others."""
        if self._modes and is_open(func, args):
            return self._modes.pop(0)
        output = output_of_layer(func, args) if self._mode_of_output else None
        return self._mode_of_output.get(_storage_key(output)) if isinstance(output, torch.Tensor) else None

    def given(self, name: str, value: Any) -> Any:
        """Return a tensor like `value` on a storage that the step is given; constants as they are."""
        if isinstance(value, torch.SymInt):
            raise CaptureError("sizes that are symbols cannot be recorded")
        if not isinstance(value, torch.Tensor):
            return value
        with self._quiet():
            like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        storage_bytes = int(value.untyped_storage().nbytes())
        self._new_storage(like, TapeStorage(name, storage_bytes, *_facts(like), is_given=True))
        return like

    def run(self, half: GeneratedHalf, prefix: str, arguments: Sequence[Any]) -> list[Any]:
        """Run the ``call`` of generated code and note what it does."""
        self._half, self._prefix = half, prefix
        text = Path(half.path).read_text(encoding="utf-8")
        self._lines = text.splitlines()
        code: dict[str, Any] = {"__name__": "torchecho_recording", "__file__": half.path}
        with mock.patch("torch._inductor.async_compile.AsyncCompile", _KernelsOnly), self._quiet():
            exec(compile(text, half.path, "exec"), code)  # noqa: S102 - Inductor generated it for this process
            for name, constant in half.constants.items():
                code[name] = self._constant(name, constant)
        self._instrument(code)
        return list(code["call"](list(arguments)))

    def text(self, value: Any) -> str:
        """Return the text of a value in a call."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._look:
                raise CaptureError("a tensor of the generated code comes from nowhere")
            return self._look[id(value)]
        if isinstance(value, _PLAIN) or (isinstance(value, float) and math.isfinite(value)):
            return repr(value)
        if isinstance(value, tuple):
            return "(" + "".join(self.text(item) + ", " for item in value) + ")"
        if isinstance(value, list):
            return "[" + ", ".join(self.text(item) for item in value) + "]"
        return self._named(value)

    def storage_of(self, value: Any) -> int | None:
        """Return the storage of a tensor, None for anything else."""
        return self._index_of[value.untyped_storage()._cdata] if isinstance(value, torch.Tensor) else None

    def put(self, value: Any, place: tuple[str, str]) -> None:
        """Say where in the program a value comes from."""
        storage = self.storage_of(value)
        if storage is not None and not any(self.tape.storages[storage].place):
            self.tape.storages[storage].place = place

    def _constant(self, name: str, constant: Any) -> Any:
        if not isinstance(constant, torch.Tensor):
            return constant
        like = torch.empty_strided(constant.shape, constant.stride(), dtype=constant.dtype, device=constant.device)
        self._new_storage(like, TapeStorage(name, 0, *_facts(like), is_given=True))
        self._look[id(like)] = self._named(constant)
        return like

    def _instrument(self, code: dict[str, Any]) -> None:
        for name, value in list(code.items()):
            if _ALLOCATOR.fullmatch(name):
                code[name] = self._allocator(name, value)
            elif isinstance(value, _Kernel):
                code[name] = self._kernel(name, value)
        self._reinterpret = code["reinterpret_tensor"]
        code["reinterpret_tensor"] = self._reinterpreted
        code["assert_size_stride"] = code["assert_alignment"] = _nothing
        code["extern_kernels"] = _Externs(self._extern, code["extern_kernels"])

    def _allocator(self, name: str, real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        device = torch.device(name.split("_")[2])

        def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            with self._quiet():
                made = torch.empty_strided(size, stride, dtype=dtype, device=device)
            code = f"{self._named(real)}({self.text(tuple(size))}, {self.text(tuple(stride))}, {self.text(dtype)})"
            label = f"buffer {len(self.tape.storages)}"
            storage_bytes = made.untyped_storage().nbytes()
            self._new_storage(made, TapeStorage(label, storage_bytes, *_facts(made), code=code))
            return made

        return allocate

    def _kernel(self, name: str, kernel: _Kernel) -> Callable[..., None]:
        assert self._half is not None
        real = getattr(self._half.module, name)
        code = f"{self._prefix}_{name}"
        self.tape.objects[code] = real

        def call(*args: Any) -> None:
            noted = _Call(name, real, code, args, {}, kernel.keep_reason, kernel.digest)
            self._note(noted, None, [args[i] for i in kernel.written])

        return call

    def _extern(self, name: str, real: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        call = _Call(name, real, self._named(real), args, kwargs)
        if "out" in kwargs:
            self._note(call, None, [kwargs["out"]])
            return kwargs["out"]
        with self._quiet():
            made = real(*args, **kwargs)
        self._note(call, made, [])
        return made

    def _reinterpreted(
        self, tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int
    ) -> torch.Tensor:
        with self._quiet():
            view = torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)
        real = self._reinterpret
        arguments = (tensor, tuple(size), tuple(stride), offset)
        self._alive.append(view)
        self._look[id(view)] = f"{self._named(real)}({', '.join(self.text(a) for a in arguments)})"
        return view

    def _note(self, call: "_Call", made: Any, written: Sequence[torch.Tensor]) -> None:
        given = [*map(self.text, call.args), *(f"{key}={self.text(value)}" for key, value in call.kwargs.items())]
        code = f"{call.name}({', '.join(given)})"
        new, views = self._results(made, code)
        if views and not written and not new:
            return
        out = {id(t) for t in written}
        if any(id(view) not in out for view in views):
            raise CaptureError(f"{call.label} returns both new tensors and views")
        leaves = tree_leaves([list(call.args), dict(call.kwargs)])
        reads = [t for t in leaves if isinstance(t, torch.Tensor) and id(t) not in out]
        entry = Entry(
            label=call.label,
            code=code,
            reads=tuple(dict.fromkeys(self._index(t) for t in reads)),
            writes=tuple(dict.fromkeys(self._index(t) for t in written)),
            makes=tuple(new),
            nodes=self._nodes(),
            keep_reason=call.keep_reason,
            digest=call.digest,
            function=call.function,
            args=tuple(call.args),
            kwargs=dict(call.kwargs),
        )
        (self.tape.forward if self._prefix == "f" else self.tape.backward).append(entry)

    def _results(self, made: Any, code: str) -> tuple[list[tuple[int, str]], list[torch.Tensor]]:
        """Register what a call returns: new storages with the text that picks them, and tensors on known storages."""
        new: list[tuple[int, str]] = []
        views: list[torch.Tensor] = []
        for tensor, pick in _picks(made, ""):
            if tensor.untyped_storage()._cdata in self._index_of:
                views.append(tensor)
                self._alive.append(tensor)
                self._look.setdefault(id(tensor), code + pick)
            else:
                label = f"result {len(self.tape.storages)}"
                storage = TapeStorage(label, tensor.untyped_storage().nbytes(), *_facts(tensor))
                new.append((self._new_storage(tensor, storage), pick))
        return new, views

    def _new_storage(self, tensor: torch.Tensor, storage: TapeStorage) -> int:
        index = len(self.tape.storages)
        self.tape.storages.append(storage)
        self._alive.append(tensor)
        self._index_of[tensor.untyped_storage()._cdata] = index
        self._look[id(tensor)] = f"s{index}"
        return index

    def _index(self, tensor: torch.Tensor) -> int:
        return self._index_of[tensor.untyped_storage()._cdata]

    def _named(self, value: Any) -> str:
        """Return a name for an object that no literal can write."""
        for name, known in self.tape.objects.items():
            if known is value:
                return name
        name = f"o{len(self.tape.objects)}"
        self.tape.objects[name] = value
        return name

    def _nodes(self) -> tuple[str, ...]:
        """Return the Dynamo nodes that the comment above the running line names."""
        assert self._half is not None
        frame: types.FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_filename != self._half.path:
            frame = frame.f_back
        for line in reversed(self._lines[: frame.f_lineno - 1] if frame is not None else []):
            named = _SOURCE_NODES.search(line)
            if named:
                return tuple(name.strip() for name in named.group(1).split(",") if name.strip())
            if not line.lstrip().startswith(("#", "buf", "assert")):
                break
        return ()

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        before, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = before


class _Externs:
    """Stands for the table of library kernels while code is recorded."""

    def __init__(self, note: Callable[..., Any], real: Any) -> None:
        self._note = note
        self._real = real

    def __getattr__(self, name: str) -> Callable[..., Any]:
        real = getattr(self._real, name)
        return lambda *args, **kwargs: self._note(name, real, args, kwargs)


def _picks(made: Any, pick: str) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield the tensors of a result with the text that picks each from it."""
    if isinstance(made, torch.Tensor):
        yield made, pick
    elif isinstance(made, (tuple, list)):
        for place, item in enumerate(made):
            yield from _picks(item, f"{pick}[{place}]")


def _storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _nothing(*_: object) -> None:
    """Stand for a check that needs real tensors."""


def _facts(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _why_kept(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Judge an operator as in a joint graph, except that writing to a buffer of the generated code is no reason."""
    overloads = [getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads()]
    if func._schema.is_mutable:
        seeded = any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)
        return "draws random numbers" if seeded else ""
    return keep_reason_of_call(func, args, kwargs, on_cuda=False)
