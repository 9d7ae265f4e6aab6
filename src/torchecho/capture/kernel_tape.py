"""The tape of generated code: every call of a forward and a backward run, and the text that makes it again."""

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class GeneratedHalf:
    """The code of a compiled forward or backward graph.

    Attributes:
        path: File of the code.
        module: The code as loaded, with its compiled kernels.
        inputs: Example inputs, fake.
        output_names: Node of each output; empty for one that is no node.
        places: Module path and source line of each output.
    """

    path: str
    module: types.ModuleType
    constants: Mapping[str, Any]
    input_names: tuple[str, ...]
    inputs: tuple[Any, ...]
    output_names: tuple[str, ...]
    places: tuple[tuple[str, str], ...]


@dataclass
class TapeStorage:
    """One allocation, or one tensor that is given.

    Attributes:
        code: Text that allocates it; empty when a call returns it, or it is given.
        place: Module path and source line of the value in it; empty when unknown.
    """

    name: str
    size_bytes: int
    shape: tuple[int, ...]
    dtype: str
    code: str = ""
    is_given: bool = False
    place: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Entry:
    """One call of the generated code.

    Attributes:
        code: Text of the call; ``s3`` stands for storage 3.
        reads, writes: Storages that it is given to read, and to write.
        makes: Storages that it returns, with the text that picks each from the result.
        nodes: Names of the Dynamo nodes that it computes.
        keep_reason: Why it may not be called twice.
        digest: Identity of a kernel's source: its name says what is fused, not how. Empty for library calls.
        function, args, kwargs: The call as objects, on fake tensors.
    """

    label: str
    code: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    makes: tuple[tuple[int, str], ...]
    nodes: tuple[str, ...]
    keep_reason: str
    digest: str
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


@dataclass
class Tape:
    """The calls of a forward and a backward run.

    Attributes:
        objects: What the texts name: kernels, functions, constants.
        outputs: Text of each output of both halves, and the storage behind it (None: not a tensor).
    """

    storages: list[TapeStorage] = field(default_factory=list)
    forward: list[Entry] = field(default_factory=list)
    backward: list[Entry] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    forward_inputs: list[int | None] = field(default_factory=list)
    forward_outputs: list[tuple[str, int | None]] = field(default_factory=list)
    backward_inputs: list[int | None] = field(default_factory=list)
    backward_outputs: list[tuple[str, int | None]] = field(default_factory=list)
