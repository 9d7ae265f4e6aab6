"""LSTM with what torch.nn.LSTM has not: layer normalisation, peepholes, coupled gates, dropout of h, zoneout."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from torchecho.nn.arguments import check_probability, check_types, pair_of_states
from torchecho.nn.module import RecurrentModule
from torchecho.rnn.variant.cell import Variant
from torchecho.rnn.variant.op import Drawn, lstm_variant
from torchecho.rnn.variant.stash import MODES


class VariantLSTM(RecurrentModule):
    """LSTM with any of five variations together; with none of them it computes what `LSTM` computes.

    Takes torch.nn.LSTM's arguments, and has its parameters and more where a variation needs them. With `proj_size`,
    dropout and zoneout of h work on the projected one.

    Args:
        layer_norm: Normalise as in Ba et al. 2016 (arXiv:1607.06450): the product of the input and that of h, each over
            all gates together, and c where h reads it; the c that is carried on is not normalised. Their scales are
            ``norm_ih_l0``, ``norm_hh_l0`` and ``norm_c_l0``, one at first; their shifts are the biases ``bias_ih_l0``,
            ``bias_hh_l0`` and ``norm_c_bias_l0``, zero at first. Epsilon is torch.nn.LayerNorm's.
        peephole: Let i and f read c before the step, and o the new c, through one weight a unit (Gers and Schmidhuber
            2000): ``peephole_l0``, [3 * H] of i, f and o.
        coupled: Forget as much as comes in, f = 1 - i (Greff et al. 2017): the weights are those of i, g and o, and the
            peepholes those of i and o.
        recurrent_dropout: Probability of dropping a unit of h wherever the recurrent weights read it, with one mask for
            a whole sequence (Gal and Ghahramani 2016), drawn anew for each call, layer and direction.
        zoneout: Probability that a unit of c and one of h stay as they were in a step (Krueger et al. 2017), or two of
            them; in evaluation the expectation.
        stash: What the forward keeps for the backward besides inputs, outputs and masks: ``"gates"`` or ``"lean"``,
            next to nothing. ``"auto"`` is ``"lean"``.
    """

    _modes = MODES
    _stores_bfloat16 = False

    def __init__(
        self,
        *args: Any,
        layer_norm: bool = False,
        peephole: bool = False,
        coupled: bool = False,
        recurrent_dropout: float = 0.0,
        zoneout: float | tuple[float, float] = 0.0,
        **kwargs: Any,
    ) -> None:
        check_types(layer_norm=layer_norm, peephole=peephole, coupled=coupled)
        check_probability("recurrent_dropout", recurrent_dropout)
        pair = zoneout if isinstance(zoneout, tuple) else (zoneout, zoneout)
        if len(pair) != 2:
            raise ValueError(f"zoneout must be one probability, or two of c and of h, got {zoneout!r}")
        for probability in pair:
            check_probability("zoneout", probability)
        self._num_gates = 3 if coupled else 4
        self.layer_norm, self.peephole, self.coupled = layer_norm, peephole, coupled
        self.recurrent_dropout, self.zoneout = float(recurrent_dropout), (float(pair[0]), float(pair[1]))
        super().__init__(*args, **kwargs)

    def reset_parameters(self) -> None:
        """Draw as torch.nn does; scales of normalisations become one, and their shifts zero."""
        super().reset_parameters()
        for name, parameter in self.named_parameters():
            if self.layer_norm and "bias" in name:
                nn.init.zeros_(parameter)
            elif name.startswith("norm"):
                nn.init.ones_(parameter)

    def _layer(
        self, x: Tensor, batch_sizes: Tensor | None, states: tuple[Tensor, ...], weights: list[Tensor]
    ) -> tuple[Tensor, ...]:
        h0, c0 = states
        masked = self.training
        zoneout = [0.0 if masked and 0 < share < 1 else share for share in self.zoneout]
        variant = Variant(self.layer_norm, self.peephole, self.coupled, *zoneout)
        drawn = self._drawn(x, h0, c0) if masked else (None, None, None)
        return lstm_variant(x, batch_sizes, (h0, c0), weights, variant, drawn, self.stash_mode)

    def _drawn(self, x: Tensor, h0: Tensor, c0: Tensor) -> Drawn:
        """Draw the noise of one layer."""
        drop, keep = None, 1 - self.recurrent_dropout
        if self.recurrent_dropout:
            drop = torch.empty_like(h0).bernoulli_(keep).div_(keep or 1.0)
        rows = math.prod(x.shape[:-1])
        shapes = [(len(state), rows, state.shape[2]) for state in (c0, h0)]
        cell, hidden = (
            torch.empty(shape, dtype=torch.uint8, device=x.device).bernoulli_(share) if 0 < share < 1 else None
            for shape, share in zip(shapes, self.zoneout, strict=True)
        )
        return drop, cell, hidden

    def _shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        H, G = self.hidden_size, self._num_gates
        shapes = super()._shapes(layer)
        found: dict[str, tuple[int, ...]] = {}
        for suffix in ("", "_reverse")[: self._num_directions]:
            end = f"_l{layer}{suffix}"
            found |= {name: shape for name, shape in shapes.items() if name.split("_", 2)[2] == end[1:]}
            if self.layer_norm:
                found |= {f"norm_ih{end}": (G * H,), f"norm_hh{end}": (G * H,), f"norm_c{end}": (H,)}
            if self.layer_norm and self.bias:
                found[f"norm_c_bias{end}"] = (H,)
            if self.peephole:
                found[f"peephole{end}"] = ((G - 1) * H,)
        return found

    def _state_shapes(self, batch: int) -> list[tuple[int, int, int]]:
        (of_h,) = super()._state_shapes(batch)
        return [of_h, (*of_h[:2], self.hidden_size)]

    def _states(self, hx: Any) -> tuple[Tensor, ...] | None:
        return None if hx is None else pair_of_states(hx)

    def _as_hx(self, states: list[Tensor]) -> Any:
        return tuple(states)

    def extra_repr(self) -> str:
        """Return the sizes, and whatever is not at its default."""
        switches = [f"{name}=True" for name in ("layer_norm", "peephole", "coupled") if getattr(self, name)]
        if self.recurrent_dropout:
            switches.append(f"recurrent_dropout={self.recurrent_dropout}")
        if any(self.zoneout):
            switches.append(f"zoneout={self.zoneout}")
        return ", ".join((super().extra_repr(), *switches))
