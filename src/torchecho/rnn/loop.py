"""The time loop over a cell that the user wrote, whole or in chunks whose insides the backward makes again."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from torchecho.errors import OptionError, RecomputeError

#: Takes the input of one step and the state before it; returns the output and the state after it.
Cell = Callable[[Tensor, Any], tuple[Tensor, Any]]


def run_cell(
    cell: Cell, x: Tensor, batch_sizes: Tensor | None, state: Any, *, reverse: bool, chunk_steps: int | None
) -> tuple[Tensor, Any]:
    """Run a cell over padded [T, B, I] or packed [rows, I] input, in any state made of tensors with rows first.

    With `chunk_steps`, only the states between chunks of so many steps are kept for the backward. Autograd's graph is
    the same, node by node, as that of the plain loop: what its nodes read comes from running the chunk again, in the
    state of the random generators that it ran in. So gradients of any order have the bits of the plain loop's. What a
    cell reads beside its arguments and parameters must stay as it was until the backward; nobody looks after that.

    Raises:
        RecomputeError: in the backward: the input, a state between chunks or a parameter was changed in place since.
        OptionError: the cell returns something else than an output and a state like the one before, or a state's
            tensors have not one row for each sequence.
    """
    inputs = list(x.unbind(0)) if batch_sizes is None else list(x.split(batch_sizes.tolist()))
    check_rows(state, inputs[0].shape[0])
    order = list(reversed(inputs)) if reverse else inputs
    size = chunk_steps or len(order)
    lean = chunk_steps is not None and torch.is_grad_enabled()
    outputs: list[Tensor] = []
    for begin in range(0, len(order), size):
        given = (cell, order[begin : begin + size], state)
        made, state = checkpoint(_repeatable(given), *given, use_reentrant=False) if lean else _chunk(*given)
        outputs += made
    if reverse:
        outputs.reverse()
    return torch.stack(outputs) if batch_sizes is None else torch.cat(outputs), state


def _repeatable(given: tuple[Cell, list[Tensor], Any]) -> Callable[..., tuple[list[Tensor], Any]]:
    """Return what runs a chunk on what is given; a compiler looks after changes itself."""
    return _chunk if torch.compiler.is_compiling() else _Chunk(*given)


class _Chunk:
    """Runs a chunk, and again only on what it has run on before."""

    def __init__(self, cell: Cell, inputs: list[Tensor], state: Any) -> None:
        parameters = list(cell.parameters()) if isinstance(cell, nn.Module) else []
        read = (*inputs, *pytree.tree_leaves(state), *parameters)
        self._versions = [(weakref.ref(tensor), _version(tensor)) for tensor in read]

    def __call__(self, cell: Cell, inputs: list[Tensor], state: Any) -> tuple[list[Tensor], Any]:
        for reference, version in self._versions:
            tensor = reference()
            if tensor is not None and _version(tensor) != version:
                raise RecomputeError(
                    f"a tensor of shape {tuple(tensor.shape)} that the cell of a Recurrent reads was changed in place"
                    f" between forward and backward (version {_version(tensor)}, expected {version}): call backward()"
                    ' before changing it, change a clone, or use stash="all"'
                )
        return _chunk(cell, inputs, state)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - what autograd looks at


def _chunk(cell: Cell, inputs: list[Tensor], state: Any) -> tuple[list[Tensor], Any]:
    outputs = []
    for x in inputs:
        output, state = _step(cell, x, state)
        outputs.append(output)
    return outputs, state


def _step(cell: Cell, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Run one step of the first rows; the other rows of the state stay as they are."""
    rows = x.shape[0]
    parts, spec = pytree.tree_flatten(state)
    result: Any = cell(x, pytree.tree_unflatten([part[:rows] for part in parts], spec))
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)):
        raise OptionError(
            f"a cell must return (output, state), a tensor and a state, got {type(result).__name__}; "
            "wrap a cell that returns its state alone, such as torch.nn.LSTMCell"
        )
    output, after = result
    found, found_spec = pytree.tree_flatten(after)
    if found_spec != spec:
        raise OptionError(f"a cell must return a state of the form that it is given, {spec}, got {found_spec}")
    whole = [torch.cat((n, o[rows:])) if rows < o.shape[0] else n for n, o in zip(found, parts, strict=True)]
    return output, pytree.tree_unflatten(whole, spec)


def check_rows(state: Any, batch: int) -> None:
    """Raise OptionError unless every part of a state is a tensor with one row for each sequence."""
    for part in pytree.tree_leaves(state):
        if not isinstance(part, Tensor) or part.dim() == 0 or part.shape[0] != batch:
            found = list(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise OptionError(f"every part of a state must be a tensor of {batch} rows, one a sequence, got {found}")
