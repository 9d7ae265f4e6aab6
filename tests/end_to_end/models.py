"""Small models, one for each kind of trouble that a joint graph can meet; each gives a scalar loss."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Case:
    """A model, and the inputs of one step."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]


class Loss(nn.Module):
    """Mean square of what a model makes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the loss."""
        made = self.model(*inputs)
        return (made[0] if isinstance(made, tuple) else made).pow(2).mean()


def perceptron() -> nn.Module:
    """Linear layers with dropout and batch normalisation."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2)]
    return Loss(nn.Sequential(*layers))


class Block(nn.Module):
    """A pre-norm Transformer block with hand-written or fused attention."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(2)])
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Attend and transform, (B, T, 32) to the same."""
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = F.dropout((q @ k.transpose(-1, -2) / math.sqrt(8)).softmax(-1), 0.1, self.training) @ v
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.1, self.training)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Convolutions(nn.Module):
    """A small U-shaped network: convolutions, batch norm, pooling and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(24, 4, 3)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, 3, 16, 16)."""
        a = F.relu(self.norm(self.a(x)))
        b = F.relu(self.b(F.max_pool2d(a, 2)))
        return self.c(torch.cat([a, F.interpolate(b, scale_factor=2.0)], 1))


class Residual(nn.Module):
    """A residual block that adds and cuts off in place, with a projection made after what it is added to."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(ins, outs, 3, padding=1, bias=False), nn.Conv2d(outs, outs, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outs) for _ in range(3)])
        self.projection = nn.Conv2d(ins, outs, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, ins, Y, X) to (B, outs, Y, X)."""
        y = self.relu(self.norms[0](self.a(x)))
        y = self.norms[1](self.b(y))
        y += self.norms[2](self.projection(x))
        return self.relu(y)


class InPlace(nn.Module):
    """Activations, a mask, a gate and dropout, all in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(24, 48), nn.Linear(48, 48), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 24) to the same."""
        y = F.silu(self.a(x), inplace=True)
        left, right = F.dropout(self.b(y), 0.3, self.training, inplace=True).chunk(2, 1)
        left = self.c(left).masked_fill_(right > 1, 0.5)
        return left.mul_(torch.sigmoid(right)).add_(x)


class CellLoop(nn.Module):
    """An LSTM cell in a Python loop with attention over what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.key = nn.LSTMCell(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Read (T, B, 16)."""
        h = c = x.new_zeros(x.shape[1], 16)
        keys = self.key(x)
        for step in x:
            h, c = self.cell(step + h, (h, c))
            scores = torch.tanh(keys + h).sum(-1)
            h = h + (scores.softmax(0).unsqueeze(-1) * x).sum(0)
        return h


class Tied(nn.Module):
    """An embedding whose weight is the output layer's too, and one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(40, 24), nn.Linear(24, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of guessing each token from itself."""
        x = self.embedding(tokens)
        x = torch.tanh(self.middle(torch.tanh(self.middle(x))))
        return F.cross_entropy((x @ self.embedding.weight.t()).flatten(0, 1), tokens.flatten())


class ChangingBuffer(nn.Module):
    """Reads a buffer that it changes afterwards (PyTorch's own partitioner recomputes from the changed value)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.full((16, 16), 0.5))
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        """Scale twice by what was read before the change."""
        scale = torch.sin(self.count)
        y = torch.tanh((x @ self.weight) * scale) * scale
        self.count.add_(1.0)
        return y


class Flat(nn.Module):
    """Parameters that are parts of one storage, as those of recurrent layers are on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(2 * 16 * 16) * 0.3
        self.first = nn.Parameter(flat[: 16 * 16].view(16, 16))
        self.second = nn.Parameter(flat[16 * 16 :].view(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 16)."""
        return torch.tanh(torch.sin(torch.tanh(x @ self.first) @ self.second) @ self.first)


class Square(torch.autograd.Function):
    """A custom function that stashes an intermediate value on its context."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        """Return tanh(x) squared."""
        inner = torch.tanh(x)
        ctx.save_for_backward(inner)
        return inner * inner

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> Tensor:
        """Differentiate by the stashed tanh."""
        (inner,) = ctx.saved_tensors
        return grads[0] * 2 * inner * (1 - inner * inner)


class Views(nn.Module):
    """Views of views, in-place ops on intermediate values, splits, expanded and overlapping views, an unused output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(24, 24) * 0.2), nn.Parameter(torch.zeros(1, 24))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(24), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Take (8, 24) through every kind of view."""
        y = x @ self.weight + self.bias.expand(8, 24)
        a, b = y.split(12, dim=1)
        a = a.clone()
        a[:, :6].mul_(2.0)
        a.add_(b)
        z = torch.cat([a, b.flip(1)], 1).t().contiguous().view(6, 4, 8)[1:5].transpose(0, 2)
        z = z.unfold(1, 2, 1).sum(-1)
        values, _ = z.reshape(8, -1).topk(5, dim=1)
        return Square.apply(values * self.frozen[:5]) + torch.zeros(0).sum()


class Checkpointed(nn.Module):
    """A user's own activation checkpoint, with dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(24, 48), nn.Linear(48, 24)

    def _inner(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(torch.sigmoid(self.a(x)), 0.3, self.training))

    def forward(self, x: Tensor) -> Tensor:
        """Recompute the inner part as the user said."""
        y = checkpoint(self._inner, x, use_reentrant=False)
        assert isinstance(y, Tensor)
        return torch.tanh(y) + x


class Autocast(nn.Module):
    """Layers under bfloat16 autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 24))

    def forward(self, x: Tensor) -> Tensor:
        """Run in bfloat16."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layers(x).float()


def _normal(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape),)


CASES: dict[str, Case] = {
    "perceptron": Case(perceptron, _normal(16, 32)),
    "attention": Case(lambda: Loss(nn.Sequential(Block(fused=False), Block(fused=False))), _normal(4, 12, 32)),
    "fused attention": Case(lambda: Loss(nn.Sequential(Block(fused=True), Block(fused=True))), _normal(4, 12, 32)),
    "convolutions": Case(lambda: Loss(Convolutions()), _normal(2, 3, 16, 16)),
    "residual": Case(
        lambda: Loss(nn.Sequential(Residual(3, 8), Residual(8, 8), Residual(8, 4))), _normal(2, 3, 12, 12)
    ),
    "in place": Case(lambda: Loss(nn.Sequential(InPlace(), InPlace())), _normal(16, 24)),
    "cell loop": Case(lambda: Loss(CellLoop()), _normal(6, 4, 16)),
    "lstm": Case(lambda: Loss(nn.LSTM(12, 16, num_layers=2, dropout=0.2, bidirectional=True)), _normal(5, 3, 12)),
    "gru": Case(lambda: Loss(nn.GRU(12, 16, batch_first=True)), _normal(3, 5, 12)),
    "rnn": Case(lambda: Loss(nn.RNN(12, 16)), _normal(5, 3, 12)),
    "tied": Case(Tied, lambda: (torch.randint(0, 40, (4, 9)),)),
    "changing buffer": Case(lambda: Loss(ChangingBuffer()), _normal(16, 16)),
    "flat parameters": Case(lambda: Loss(Flat()), _normal(16, 16)),
    "spectral norm": Case(
        lambda: Loss(nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), nn.Tanh())),
        _normal(8, 16),
    ),
    "views": Case(lambda: Loss(Views()), _normal(8, 24)),
    "checkpointed": Case(lambda: Loss(nn.Sequential(Checkpointed(), Checkpointed())), _normal(8, 24)),
    "autocast": Case(lambda: Loss(nn.Sequential(Autocast(), Autocast())), _normal(8, 24)),
    "double precision": Case(lambda: perceptron().double(), lambda: (torch.randn(16, 32).double(),)),
}
