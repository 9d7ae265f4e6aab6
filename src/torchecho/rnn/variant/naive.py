"""One layer of an LSTM variant in plain PyTorch: what the kernels must agree with. Differentiable any number of times.

Layer normalisation as in Ba et al. 2016 (arXiv:1607.06450), equations 20 to 22: of both products before they are added,
over all gates together, and of c on its way to h, while c itself is carried as it is. Peepholes as in Gers and
Schmidhuber 2000, coupled gates (f = 1 - i) as in Greff et al. 2017, zoneout as in Krueger et al. 2017.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchecho.rnn.recurrence import State, Step, run
from torchecho.rnn.variant.cell import Noise, Variant, VariantWeights


def layer(
    x: Tensor,
    batch_sizes: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    weights: Sequence[VariantWeights],
    variant: Variant,
    noise: Sequence[Noise],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of all directions side by side, and the last h [D, B, P] and c [D, B, H]."""
    ran = []
    for d, w in enumerate(weights):
        step = _step(w, variant, noise[d], _draws(x, batch_sizes, noise[d], reverse=d == 1))
        ran.append(run(step, _inputs(x, w), batch_sizes, (h0[d], c0[d]), reverse=d == 1))
    y = torch.cat([outputs for outputs, _ in ran], -1)
    return y, torch.stack([state[0] for _, state in ran]), torch.stack([state[1] for _, state in ran])


def _inputs(x: Tensor, w: VariantWeights) -> Tensor:
    if w.input_norm is None:
        return F.linear(x, w.input, w.input_bias)
    return F.layer_norm(F.linear(x, w.input), w.input_norm.shape, w.input_norm, w.input_bias)


def _draws(
    x: Tensor, batch_sizes: Tensor | None, noise: Noise, *, reverse: bool
) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Yield the zoneout masks of each step, in the order of processing."""
    sizes = [x.shape[1]] * x.shape[0] if batch_sizes is None else batch_sizes.tolist()
    nothing: list[Tensor | None] = [None] * len(sizes)
    masks = [nothing if m is None else list(m.split(sizes)) for m in (noise.zone_cell, noise.zone_hidden)]
    steps = list(zip(*masks, strict=True))
    return iter(reversed(steps) if reverse else steps)


def _step(
    w: VariantWeights, variant: Variant, noise: Noise, draws: Iterator[tuple[Tensor | None, Tensor | None]]
) -> Step:
    def step(inputs: Tensor, state: State) -> State:
        h, c = state
        gates = inputs + _product(h if noise.drop is None else h * noise.drop[: h.shape[0]], w)
        made, o = _cell(gates, c, w, variant)
        shown = made if w.cell_norm is None else F.layer_norm(made, w.cell_norm.shape, w.cell_norm, w.cell_bias)
        new_h = o.sigmoid() * shown.tanh()
        new_h = new_h if w.projection is None else F.linear(new_h, w.projection)
        zone_cell, zone_hidden = next(draws)
        return (
            _keep(h, new_h, zone_hidden, variant.zoneout_hidden),
            _keep(c, made, zone_cell, variant.zoneout_cell),
        )

    return step


def _product(h: Tensor, w: VariantWeights) -> Tensor:
    if w.hidden_norm is None:
        return F.linear(h, w.hidden, w.hidden_bias)
    return F.layer_norm(F.linear(h, w.hidden), w.hidden_norm.shape, w.hidden_norm, w.hidden_bias)


def _cell(gates: Tensor, c: Tensor, w: VariantWeights, variant: Variant) -> tuple[Tensor, Tensor]:
    """Return the new c, and o before activation."""
    peeps = None if w.peephole is None else w.peephole.view(-1, c.shape[-1])
    if variant.coupled:
        i, g, o = gates.chunk(3, -1)
        i = (i if peeps is None else i + peeps[0] * c).sigmoid()
        f = 1 - i
    else:
        i, f, g, o = gates.chunk(4, -1)
        i = (i if peeps is None else i + peeps[0] * c).sigmoid()
        f = (f if peeps is None else f + peeps[1] * c).sigmoid()
    made = f * c + i * g.tanh()
    return made, o if peeps is None else o + peeps[-1] * made


def _keep(old: Tensor, new: Tensor, mask: Tensor | None, share: float) -> Tensor:
    if mask is None and share == 0:
        return new
    kept = share if mask is None else mask.to(new.dtype)
    return kept * old + (1 - kept) * new
