"""Random training programs as data: a list of instructions, and the module that runs them in plain PyTorch.

All values are of one shape (B, H), so that any instruction can take any value. What an instruction does inside (views,
writes in place, several outputs, other dtypes, modes and hooks of the user) is what can go wrong.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

B, H = 8, 16
NUM_LAYERS = 3


class Instruction(NamedTuple):
    """One line of a program: what to do with which two values, and a number that varies it."""

    name: str
    left: int
    right: int
    number: int


@dataclass(frozen=True)
class Program:
    """A program, and how it is trained.

    Attributes:
        training: How gradients are asked for, by name of `tests.end_to_end.training.TRAININGS`.
        input_needs_gradient: Whether the gradient of the input is asked for.
    """

    instructions: tuple[Instruction, ...]
    training: str = "backward"
    input_needs_gradient: bool = False


class Shared(torch.autograd.Function):
    """Stashes an input and an output and asks for both twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        made = torch.tanh(x) * y
        ctx.save_for_backward(x, y, made)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, y, _ = ctx.saved_tensors
        _, _, made = ctx.saved_tensors
        t = torch.tanh(x)
        return grads[0] * y * (1 - t * t) + 0 * made, grads[0] * t


class Inner(nn.Module):
    """A module to hang hooks on."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * x


class Runner(nn.Module):
    """Runs a program and returns its loss; counts steps, and how often hooks of the user fire."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.layers = nn.ModuleList([nn.Linear(H, H) for _ in range(NUM_LAYERS)])
        self.norm, self.batch_norm = nn.LayerNorm(H), nn.BatchNorm1d(H)
        self.embedding, self.cell = nn.Embedding(H, H), nn.GRUCell(H, H)
        self.gru = nn.GRU(H, H)
        self.lstm, self.convolution = nn.LSTM(H, H), nn.Conv1d(1, 2, 3, padding=1)
        self.inner = Inner()
        self.inner.register_forward_hook(lambda module, args, made: made * 1.5)
        self.inner.register_full_backward_hook(self._count)
        self.code = nn.Parameter(torch.eye(H) * 0.5, requires_grad=False)
        self.register_buffer("scale", torch.full((H,), 0.5))
        self.register_buffer("carried", torch.zeros(B, H))
        self.num_steps = self.num_hooks = 0

    def _count(self, *_: object) -> None:
        self.num_hooks += 1

    def forward(self, x: Tensor) -> Tensor:
        """Run the program on (B, H)."""
        values = [x]
        for one in self.program.instructions:
            left, right = values[one.left % len(values)], values[one.right % len(values)]
            values.append(INSTRUCTIONS[one.name](self, left, right, one.number))
        self.num_steps += 1
        return torch.stack([value.pow(2).mean() for value in values[-3:]]).sum()


Body = Callable[[Runner, Tensor, Tensor, int], Tensor]
INSTRUCTIONS: dict[str, Body] = {}


def instruction(body: Body) -> Body:
    """Add a function to the instructions, by its name."""
    INSTRUCTIONS[body.__name__] = body
    return body


@instruction
def linear(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    return m.layers[n % NUM_LAYERS](a)


@instruction
def tied(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    return a @ m.layers[n % NUM_LAYERS].weight.t() + b


@instruction
def pointwise(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    return (torch.tanh, torch.sigmoid, F.gelu, F.relu, torch.sin, F.silu, F.softplus, torch.abs)[n % 8](a)


@instruction
def arithmetic(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    return (a * b, a - b, a / (b * b + 1), torch.addcmul(a, a, b, value=0.5), a.lerp(b, 0.3), torch.hypot(a, b + 3))[
        n % 6
    ]


@instruction
def slices(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    cut = 1 + n % (H - 1)
    return torch.cat([torch.tanh(a[:, cut:]), b[:, :cut] * a[:, :cut]], 1)


@instruction
def chunks(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    first, second = torch.exp(-(a * a)).chunk(2, 1)
    return torch.cat([first * second, b[:, : H // 2] + first], 1)


@instruction
def stacked_rows(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    state, rows = b[0], []
    for row in a.unbind(0):
        state = torch.tanh(row + state * 0.5)
        rows.append(state)
    return torch.stack(rows)


@instruction
def transposed(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    view = torch.tanh(a).t()[n % 2 :: 2]
    return torch.cat([view, view.flip(0)], 0).reshape(B, H) * b.t().contiguous().view(B, H)


@instruction
def overlapping(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    return F.pad(torch.sigmoid(a), (1, 1)).unfold(1, 3, 1).prod(-1) + a[:1].expand(B, H) * b


@instruction
def cells(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    h = b
    for _ in range(1 + n % 3):
        h = m.cell(a, h)
    return h


@instruction
def lstm(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    made, (h, _) = m.lstm(a.unsqueeze(1))
    return made.squeeze(1) + h[0] * b


@instruction
def packed(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    sequence = nn.utils.rnn.pack_padded_sequence(torch.stack([a, b], 1), [B, 1 + n % B])
    made, _ = m.lstm(sequence)
    padded, _ = nn.utils.rnn.pad_packed_sequence(made, total_length=B)
    return padded.sum(1)


@instruction
def convolution(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    return F.relu(m.convolution(a.unsqueeze(1))).mean(1)


@instruction
def pooled(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    return F.max_pool1d(a.unsqueeze(1), 2).squeeze(1).repeat(1, 2) * b


@instruction
def softmax(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    return a.softmax(n % 2) * b if n % 3 else a.log_softmax(1) * b


@instruction
def attention(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    q, k = a.view(1, 2, B // 2, H), b.reshape(1, 2, B // 2, H)
    return F.scaled_dot_product_attention(q, k, q * k, dropout_p=0.2 * (n % 2)).reshape(B, H)


@instruction
def layer_norm(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    return m.norm(a)


@instruction
def batch_norm(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    return m.batch_norm(a)


@instruction
def statistics(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    """Read what batch norm is about to change, by hand or as batch norm does in evaluation."""
    if n % 2:
        read = (a - m.batch_norm.running_mean) * (m.batch_norm.running_var + 1).rsqrt()
    else:
        m.batch_norm.eval()
        read = m.batch_norm(a)
        m.batch_norm.train()
    return torch.tanh(read) * m.batch_norm(b)


@instruction
def codebook(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    """Change a parameter that nobody differentiates after it was read, in every step or in some."""
    read = torch.sin(a.detach() @ m.code)
    new = m.code * 0.9 + 0.01
    if n % 2 and m.num_steps % 2:
        pass
    elif n % 3 == 0:
        m.code.data = new
    elif n % 3 == 1:
        m.code.data.copy_(new)
    else:
        with torch.no_grad():
            m.code.copy_(new)
    return a * read * torch.sigmoid(read) + b


@instruction
def renormed(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    """Look up an embedding that shortens its rows when they are asked for."""
    index = (a[:, 0].detach() * 3).long().abs() % H
    first, second = (F.embedding((index + i * n) % H, m.embedding.weight, max_norm=0.5 + i) for i in range(2))
    return torch.tanh(first) * b + torch.tanh(second)


@instruction
def switched(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    """Have kernels chosen in another way for a part of the forward."""
    torch.backends.mkldnn.set_flags(bool(n % 2))
    made = torch.tanh(m.convolution(a.unsqueeze(1))).mean(1)
    torch.backends.mkldnn.set_flags(True)
    return made * b


@instruction
def embedding(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    return m.embedding((a[:, 0].detach() * 3).long().abs() % H) + b


@instruction
def choices(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    if n % 3 == 0:
        values, indices = a.topk(H // 2, 1)
        return torch.cat([values, b.gather(1, indices)], 1)
    if n % 3 == 1:
        values, indices = torch.sort(a, 1)
        return values * b.gather(1, indices)
    return (a * a).max(0).values * b


@instruction
def where(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    mask = a > b
    return torch.where(mask, a * 2, b).masked_fill(mask & (a > 1), 0.25)


@instruction
def indexed(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    rows = torch.tensor([n % B, (n + 1) % B, n % B], device=a.device)
    return torch.tanh(a).index_add(0, rows, b[rows] * a[rows])


@instruction
def several(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    variance, mean = torch.var_mean(a, 1, keepdim=True)
    low, high = torch.aminmax(b, dim=1, keepdim=True)
    return (a - mean) * (variance + 1).rsqrt() + low * high


@instruction
def dropout(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    if n % 3 == 2:
        return a * torch.rand_like(b)
    return F.dropout(a * 1.0, 0.3, inplace=bool(n % 3))


@instruction
def in_place(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    fresh = a + b
    fresh.mul_(0.5).add_(b)
    fresh[:, : 1 + n % H].sub_(1.0)
    return F.relu_(fresh) if n % 2 else fresh


@instruction
def residual(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    """Add what is made later to what is made first, and cut it off, all in place."""
    fresh = (m.batch_norm, m.norm, m.layers[0], torch.Tensor.cos)[n % 4](a)
    fresh += torch.tanh(b) * a if n % 3 else b
    return F.relu(fresh, inplace=True) if n % 2 else F.hardtanh(fresh, -0.5, 0.5, inplace=True)


@instruction
def gated_in_place(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    """Change parts of a value by other parts of it, as an unfused cell does."""
    gates = torch.cat([a * 0.5, b], 1).mul(1.5).unsafe_chunk(2 + 2 * (n % 2), 1)
    gates[0].add_(gates[-1] if n % 3 == 0 else a[:, : gates[0].shape[1]]).sigmoid_()
    gates[1].mul_(gates[0])
    fresh = gates[1] - gates[0]
    fresh.mul_(torch.sigmoid(fresh)).add_(gates[1])
    return torch.cat([fresh, gates[0], *gates[1:-1], gates[-1].tanh_()][: 2 + 2 * (n % 2)], 1)[:, :H]


@instruction
def activated_in_place(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    fresh = F.linear(a, m.layers[n % NUM_LAYERS].weight)
    made = (F.silu, F.elu, F.hardswish, F.leaky_relu, F.relu6, F.celu)[n % 6](fresh, inplace=True)
    return made.masked_fill_(b > 0.5, 0.1) if n % 4 == 0 else made


@instruction
def written_rows(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    made = torch.zeros_like(b)
    for row in range(B):
        if n % 2:
            made[row] = torch.tanh(a[row]) * b[row]
        else:
            made[row].add_(a[row] * b[row]).clamp_(-1, 1)
    made[:, n % H] *= 0.5
    return made


@instruction
def gru(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    made, (h, *_) = m.gru(torch.stack([a, b, a - b][: 1 + n % 3]))
    return made.sum(0) + h * 0.5


@instruction
def in_place_after_read(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    fresh = torch.tanh(a) + b
    before = fresh + 1
    copy = fresh.clone().sin()
    fresh.add_(before)
    fresh.view(-1)[n % H :: 2] = 0.5
    return fresh * 2 + copy


@instruction
def in_place_on_detached(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    table = torch.zeros(B, H)
    read = (table + a.detach()).sin()
    for row in range(1 + n % 3):
        table[row] += torch.tanh(a.detach()[row])
    return a * read + table


@instruction
def mutations(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    """Change several values in place, through views of them, in an order that the number gives."""
    choose = random.Random(n)
    values = [FRESH[choose.randrange(len(FRESH))](m, a, b), a * b]
    for _ in range(2 + n % 6):
        one, other = choose.choice(values), choose.choice(values)
        if one.numel() == 0 or one.shape != other.shape:
            other = b if one.shape == b.shape else torch.full((), 0.25)
        kind = choose.randrange(3)
        if kind == 0:
            values.append(VIEWS[choose.randrange(len(VIEWS))](one))
        elif kind == 1:
            CHANGES[choose.randrange(len(CHANGES))](one, other)
        else:
            values.append(READS[choose.randrange(len(READS))](one, other))
    return torch.stack([value.sum() for value in values]).sum() * 0.01 + values[0]


FRESH: list[Callable[[Runner, Tensor, Tensor], Tensor]] = [
    lambda m, a, b: torch.tanh(a),
    lambda m, a, b: a @ m.layers[0].weight,
    lambda m, a, b: m.layers[0](a),
    lambda m, a, b: m.norm(a),
    lambda m, a, b: F.dropout(a, 0.3),
    lambda m, a, b: a.clone(),
    lambda m, a, b: torch.zeros_like(a),
    lambda m, a, b: m.cell(a, b),
]
VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x[: x.shape[0] // 2],
    lambda x: x[..., 1::2],
    lambda x: x.t() if x.dim() == 2 else x,
    lambda x: x.detach(),
    lambda x: x.view(x.shape),
    lambda x: x[-1:],
    lambda x: x.narrow(-1, 0, x.shape[-1]),
]
CHANGES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x.mul_(0.5),
    lambda x, y: x.add_(y, alpha=0.5),
    lambda x, y: x.sub_(y),
    lambda x, y: x.mul_(y),
    lambda x, y: x.copy_(torch.sin(y)),
    lambda x, y: x.relu_(),
    lambda x, y: x.tanh_(),
    lambda x, y: x.clamp_(-0.5, 0.5),
    lambda x, y: x.zero_(),
    lambda x, y: x.fill_(0.3),
    lambda x, y: x.addcmul_(x.detach() * 1.0, y.detach(), value=0.1),
    lambda x, y: x.masked_fill_(x.detach() > 0.2, 0.1),
    lambda x, y: F.dropout(x, 0.25, inplace=True),
    lambda x, y: F.dropout(x, 0.0, inplace=True),
    lambda x, y: x.lerp_(torch.cos(y).expand_as(x), 0.3),
]
READS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x * y,
    lambda x, y: torch.sin(x),
    lambda x, y: x + y,
    lambda x, y: torch.exp(-(x * x)),
    lambda x, y: x.clone(),
    lambda x, y: torch.cat([x, x]),
]


@instruction
def tied_in_place(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    """Use one weight twice, and change in place what it makes."""
    weight = m.layers[n % NUM_LAYERS].weight
    first = a @ weight.t()
    first = F.relu_(first) if n % 2 else first.add_(b)
    second = first @ weight
    second.mul_(0.5).add_(first)
    return F.dropout(second, 0.3 * (n % 3 > 0), inplace=True)


@instruction
def dropped_in_place(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    fresh = F.dropout(m.layers[n % NUM_LAYERS](a).add_(b), 0.4, inplace=True)
    fresh[:, : 1 + n % H].mul_(0.5)
    if n % 4 == 0:
        F.alpha_dropout(fresh, 0.2, inplace=True)
    if n % 4 == 1:
        F.rrelu(fresh.sub_(0.1), training=True, inplace=True)
    return F.leaky_relu_(fresh + b) if n % 3 else fresh


@instruction
def in_place_on_value(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    """Change a value of the program itself: PyTorch raises where the backward needs it, and so must we."""
    if n % 4 or a.is_leaf:
        return a * 0.5
    changes = (a.mul_, a[:, : 1 + n % H].add_, a.t().sub_, a[n % B :].mul_)
    return changes[n // 4 % 4](0.5).sum() * b


@instruction
def filled(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    made = torch.empty_like(a)
    for row in range(B):
        made[row] = torch.tanh(a[row]) * b[row]
    return made


@instruction
def branch(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    if (m.num_steps + n) % 2:
        return torch.tanh(a * b)
    return torch.sigmoid(a) + torch.tanh(b)


@instruction
def branch_on_values(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    return torch.tanh(a) if a.sum().item() > 0 else torch.exp(-a.abs()) * b


@instruction
def branch_at_random(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    return torch.tanh(a) if random.random() < 0.5 else F.gelu(a)


@instruction
def growing_loop(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    for _ in range(3 - m.num_steps % 3 if n % 2 else 1 + m.num_steps):
        a = torch.tanh(a + b) * a
    return a


@instruction
def custom(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    shared = torch.sigmoid(a)
    return torch.sin(Shared.apply(shared, b)) * shared.cos()


@instruction
def detached(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    return a.detach() * b


@instruction
def island(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    with torch.no_grad():
        fixed = torch.tanh(a) * b
        fixed.add_(1.0)
    return fixed * b


@instruction
def buffers(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    read = torch.sin(m.scale) * a
    m.scale.add_(0.1)
    return torch.tanh(read) * torch.sin(m.scale)


@instruction
def carried(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    made = torch.tanh(a + m.carried)
    m.carried = made.detach()
    return made


@instruction
def hooked(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    made = torch.tanh(a) * b
    if made.requires_grad:
        made.register_hook(lambda grad: grad * 0.5)
        made.register_hook(m._count)
    return torch.sin(made)


@instruction
def hooked_module(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    return m.inner(a * 1.0)


@instruction
def checkpointed(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    made = checkpoint(_checkpointed, m, a, b, n, use_reentrant=False)
    assert isinstance(made, Tensor)
    return torch.tanh(made) * a


@instruction
def checkpointed_reentrant(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    if not (a.requires_grad or b.requires_grad):
        return a
    made = checkpoint(_checkpointed, m, a, b, n, use_reentrant=True)
    assert isinstance(made, Tensor)
    return torch.tanh(made) * a


def _checkpointed(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    return F.dropout(m.layers[n % NUM_LAYERS](torch.sigmoid(a)), 0.2) * torch.tanh(b)


@instruction
def saved_on_cpu(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return torch.tanh(a * b) * torch.sigmoid(a)


@instruction
def autocast(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = torch.tanh(m.layers[n % NUM_LAYERS](a)) @ m.layers[0].weight
    return made.float() * b


@instruction
def spectrum(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    transformed = torch.fft.fft(a) * torch.fft.fft(b).conj()
    return torch.view_as_real(transformed).sum(-1).tanh()


@instruction
def double(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    return (torch.tanh(a.double()) * b.double()).to(torch.float32)


@instruction
def penalty(m: Runner, a: Tensor, b: Tensor, n: int) -> Tensor:
    """Ask for gradients inside the forward, of which the loss depends."""
    leaf = (a.detach() * 2).requires_grad_()
    made = (torch.tanh(m.layers[n % NUM_LAYERS](leaf)) * leaf).sum()
    (gradient,) = torch.autograd.grad(made, leaf, create_graph=bool(n % 2))
    return torch.tanh(gradient) * b
