"""A layer-normalised LSTM from torch.nn's parts, as one writes it by hand: what the benchmark compares with."""

import torch
from torch import Tensor, nn


class _Layer(nn.Module):
    """The layer of Ba et al. 2016 (arXiv:1607.06450): both products normalised, and c on its way to h."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.units = units
        self.input, self.hidden = nn.Linear(inputs, 4 * units, bias=False), nn.Linear(units, 4 * units, bias=False)
        self.input_norm, self.hidden_norm = nn.LayerNorm(4 * units), nn.LayerNorm(4 * units)
        self.cell_norm = nn.LayerNorm(units)

    def in_order(self) -> list[Tensor]:
        """Return the parameters in the order of torchecho.nn.VariantLSTM's."""
        first, second, last = self.input_norm, self.hidden_norm, self.cell_norm
        weights = [self.input.weight, self.hidden.weight]
        return [*weights, first.bias, second.bias, first.weight, second.weight, last.weight, last.bias]

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], self.units)
        outputs = []
        for inputs in self.input_norm(self.input(x)).unbind(0):
            i, f, g, o = (inputs + self.hidden_norm(self.hidden(h))).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * self.cell_norm(c).tanh()
            outputs.append(h)
        return torch.stack(outputs)


class NormalisedLSTM(nn.Module):
    """Layers of it, with parameters in the order of torchecho.nn.VariantLSTM's; takes and returns [T, B, H]."""

    def __init__(self, inputs: int, units: int, layers: int) -> None:
        super().__init__()
        made = [_Layer(units if place else inputs, units) for place in range(layers)]
        self.in_order = nn.ParameterList(p for layer in made for p in layer.in_order())
        self.layers = nn.Sequential(*made)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """Return the output, in a tuple as torch.nn's layers do."""
        return (self.layers(x),)
