"""Matrix products of a GPU's layers: cuBLAS through PyTorch, which accumulates in float32 whatever the type."""

import torch
from torch import Tensor

from torchecho.rnn.gradients import WeightGradients
from torchecho.rnn.weights import Weights


def project(out: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Write ``rows @ weight.T + bias`` to `out`."""
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def write_or_add(out: Tensor, left: Tensor, right: Tensor, *, add: bool) -> None:
    """Write ``left @ right`` to `out`, or add it."""
    if add:
        out.addmm_(left, right)
    else:
        torch.mm(left, right, out=out)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to `total`, which may be float32 where the operands are not."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(torch.mm(left, right))


def add_columns(total: Tensor | None, rows: Tensor) -> None:
    """Add the sum of the rows to `total`, if there is one; sums are taken in float32."""
    if total is not None:
        total.add_(rows.sum(0, dtype=torch.float32))


def zero_gradients(weights: Weights) -> WeightGradients:
    """Return gradients of zero in float32, to which the chunks of a backward add theirs."""

    def zeros(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.new_zeros(tensor.shape, dtype=torch.float32)

    first, second = zeros(weights.input), zeros(weights.hidden)
    assert first is not None
    assert second is not None
    return WeightGradients(
        first, second, zeros(weights.input_bias), zeros(weights.hidden_bias), zeros(weights.projection)
    )


def in_type_of(weights: Weights, total: WeightGradients) -> WeightGradients:
    """Return the gradients in the type of the weights."""

    def converted(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(weights.input.dtype)

    first, second = total.input.to(weights.input.dtype), total.hidden.to(weights.input.dtype)
    biases = converted(total.input_bias), converted(total.hidden_bias)
    return WeightGradients(first, second, *biases, converted(total.projection))
