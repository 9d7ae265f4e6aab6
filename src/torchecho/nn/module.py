"""What torchecho's recurrent modules share: torch.nn's parameters, arguments and results around other layers."""

import contextlib
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchecho.errors import OptionError
from torchecho.nn import arguments
from torchecho.rnn.cuda.available import triton_runs
from torchecho.rnn.stack import run_stack


class RecurrentModule(nn.Module):
    """Base of `LSTM`, `GRU` and `RNN`; has the parameters, and so the state_dict, of their torch.nn namesakes."""

    _num_gates: int
    _modes: tuple[str, ...]
    _autocasts = True  # whether torch.nn's namesake returns autocast's type inside autocast, as on the CPU
    _stores_bfloat16 = True  # whether kernels for the CPU take bfloat16

    def __init__(  # noqa: PLR0913, PLR0917 - torch.nn's signature
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,  # noqa: FBT001, FBT002 - as above
        batch_first: bool = False,  # noqa: FBT001, FBT002 - as above
        dropout: float = 0.0,
        bidirectional: bool = False,  # noqa: FBT001, FBT002 - as above
        proj_size: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        stash: str = "auto",
    ) -> None:
        super().__init__()
        arguments.check_dropout(dropout, num_layers)
        arguments.check_types(bias=bias, batch_first=batch_first, input_size=input_size, hidden_size=hidden_size)
        arguments.check_sizes(input_size=input_size, hidden_size=hidden_size, num_layers=num_layers)
        arguments.check_projection(proj_size, hidden_size)
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout = bias, batch_first, float(dropout)
        self.bidirectional, self.proj_size = bidirectional, proj_size
        self.stash = self.checked_stash(stash)
        for layer in range(num_layers):
            for name, shape in self._shapes(layer).items():
                self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()

    @classmethod
    def modes(cls) -> tuple[str, ...]:
        """Return the stash modes of this kind of layer, from the fastest to the smallest."""
        return cls._modes

    @classmethod
    def checked_stash(cls, stash: str) -> str:
        """Return the name of a stash mode.

        Raises:
            OptionError: this kind of layer has no such mode.
        """
        if stash not in ("auto", *cls._modes):
            valid = ", ".join(("auto", *cls._modes))
            raise OptionError(f"stash={stash!r} is no stash mode of {cls.__name__}; use one of {valid}")
        return stash

    @property
    def stash_mode(self) -> str:
        """Return what a training step stashes: without a plan, ``"auto"`` stands for the least."""
        return self._modes[-1] if self.stash == "auto" else self.stash

    @property
    def all_weights(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each layer and direction, in torch.nn's order."""
        return [[getattr(self, name) for name in names] for names in self.weight_names]

    @property
    def weight_names(self) -> list[list[str]]:
        """Return the names of `all_weights`."""
        layers = [list(self._shapes(layer)) for layer in range(self.num_layers)]
        size = len(layers[0]) // self._num_directions
        return [layer[begin : begin + size] for layer in layers for begin in range(0, len(layer), size)]

    def reset_parameters(self) -> None:
        """Draw all parameters as torch.nn does: uniformly within 1 / sqrt(hidden_size)."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def flatten_parameters(self) -> None:
        """Do nothing: there is no flat copy to refresh. Code written for torch.nn calls this."""

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Any]:  # noqa: A002 - torch.nn's name
        """Run all layers.

        Args:
            input: Padded [T, B, I], or [B, T, I] if batch_first; unbatched [T, I]; or a PackedSequence.
            hx: First states, each [L * D, B, features]; zeros if None. Without batch dimension for unbatched input.

        Returns:
            The output in the form of the input, with D * P features, and the last states in the form of `hx`.
        """
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx)
        if input.dim() not in (2, 3):
            raise ValueError(f"{type(self).__name__} expects 2-D or 3-D input, got {input.dim()}-D")
        batched = input.dim() == 3
        states = self._states(hx)
        if states is not None:
            arguments.check_state_dims(states, batched=batched)
        x = input if batched else input.unsqueeze(0 if self.batch_first else 1)
        x = x.transpose(0, 1) if self.batch_first else x
        if states is not None and not batched:
            states = tuple(state.unsqueeze(1) for state in states)
        y, last = self._run(x, None, states)
        y = y.transpose(0, 1) if self.batch_first else y
        if not batched:
            y, last = y.squeeze(0 if self.batch_first else 1), [state.squeeze(1) for state in last]
        return y, self._as_hx(last)

    def _forward_packed(self, packed: PackedSequence, hx: Any) -> tuple[PackedSequence, Any]:
        data, batch_sizes, sorted_indices, unsorted_indices = packed
        if data.dim() != 2:
            raise RuntimeError(f"the data of a PackedSequence must be 2-D, got {data.dim()}-D")
        states = self._states(hx)
        if states is not None and sorted_indices is not None:
            states = tuple(state.index_select(1, sorted_indices) for state in states)
        y, last = self._run(data, batch_sizes, states)
        if unsorted_indices is not None:
            last = [state.index_select(1, unsorted_indices) for state in last]
        return PackedSequence(y, batch_sizes, sorted_indices, unsorted_indices), self._as_hx(last)

    def _run(
        self, x: Tensor, batch_sizes: Tensor | None, states: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, list[Tensor]]:
        weights = [self._layer_weights(layer) for layer in range(self.num_layers)]
        own_type, device = weights[0][0].dtype, x.device.type
        has_autocast = torch.amp.is_autocast_available(device)  # not that of the meta device
        autocast = has_autocast and torch.is_autocast_enabled(device)
        if x.dtype != own_type and not autocast:
            raise ValueError(f"the input is {x.dtype} and the weights are {own_type}; convert one to the other's type")
        arguments.check_input(x, self.input_size, batch_sizes)
        shapes = self._state_shapes(x.shape[1] if batch_sizes is None else int(batch_sizes[0]))
        if states is None:
            states = tuple(x.new_zeros(shape) for shape in shapes)
        for place, (state, shape) in enumerate(zip(states, shapes, strict=True)):
            name = f"hx[{place}]" if len(shapes) > 1 else "hx"
            arguments.check_shape(name, state, shape)
            if state.dtype != x.dtype and not autocast:
                raise RuntimeError(f"{name} is {state.dtype} and the input is {x.dtype}; give it the type of the input")
        # autocast leaves float64 alone
        autocasts = autocast and (self._autocasts or device == "cuda") and x.dtype != torch.float64
        returned = torch.get_autocast_dtype(device) if autocasts else x.dtype
        inside = self._dtype_inside(returned, x.device)
        with torch.autocast(device, enabled=False) if has_autocast else contextlib.nullcontext():
            y, last = run_stack(
                self._layer,
                x.to(inside),
                batch_sizes,
                [state.to(inside) for state in states],
                [[weight.to(inside) for weight in layer] for layer in weights],
                self.dropout if self.training else 0.0,
            )
        return y.to(returned), [state.to(returned) for state in last]

    def _dtype_inside(self, returned: torch.dtype, device: torch.device) -> torch.dtype:
        """Return the type in which layers are run to return another: that type where there are kernels of it."""
        if returned not in (torch.bfloat16, torch.float16) or (device.type == "cuda" and triton_runs(device)):
            return returned
        return returned if self._stores_bfloat16 and returned == torch.bfloat16 else torch.float32

    def _layer(
        self, x: Tensor, batch_sizes: Tensor | None, states: tuple[Tensor, ...], weights: list[Tensor]
    ) -> tuple[Tensor, ...]:
        raise NotImplementedError

    @property
    def _num_directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def _output_size(self) -> int:
        return self.proj_size or self.hidden_size

    def _state_shapes(self, batch: int) -> list[tuple[int, int, int]]:
        return [(self.num_layers * self._num_directions, batch, self._output_size)]

    def _states(self, hx: Any) -> tuple[Tensor, ...] | None:
        return None if hx is None else (hx,)

    def _as_hx(self, states: list[Tensor]) -> Any:
        return states[0]

    def _shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return the parameters of a layer: names and shapes in torch.nn's order."""
        rows, columns = self._num_gates * self.hidden_size, self._output_size
        inputs = self.input_size if layer == 0 else columns * self._num_directions
        shapes: dict[str, tuple[int, ...]] = {}
        for suffix in ("", "_reverse")[: self._num_directions]:
            end = f"_l{layer}{suffix}"
            shapes |= {f"weight_ih{end}": (rows, inputs), f"weight_hh{end}": (rows, columns)}
            if self.bias:
                shapes |= {f"bias_ih{end}": (rows,), f"bias_hh{end}": (rows,)}
            if self.proj_size:
                shapes[f"weight_hr{end}"] = (self.proj_size, self.hidden_size)
        return shapes

    def _layer_weights(self, layer: int) -> list[Any]:
        """Return the weights of a layer.

        Raises:
            RuntimeError: the program has put one of another shape in its place.
        """
        shapes = self._shapes(layer)
        weights = [getattr(self, name) for name in shapes]
        for weight, (name, shape) in zip(weights, shapes.items(), strict=True):
            arguments.check_shape(name, weight, shape)
        return weights

    def extra_repr(self) -> str:
        """Return the sizes, and whatever is not at its default."""
        defaults = {
            "proj_size": 0,
            "num_layers": 1,
            "bias": True,
            "batch_first": False,
            "dropout": 0.0,
            "bidirectional": False,
            "stash": "auto",
        }
        others = [f"{name}={getattr(self, name)}" for name, value in defaults.items() if getattr(self, name) != value]
        return ", ".join((f"{self.input_size}, {self.hidden_size}", *others))
