"""An encoder-decoder translator: LSTM encoder, additive attention, input-feeding LSTM decoder.

Shapes: B rows, S source steps, T target steps, H hidden units, E embedding width, V target vocabulary.
Sources: the attention is Bahdanau et al., "Neural Machine Translation by Jointly Learning to Align and Translate"
(2015); input feeding and the attentional vector are Luong et al., "Effective Approaches to Attention-based Neural
Machine Translation" (2015); the two-layer encoder with a bidirectional first layer is Sockeye's.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batches import BOS, EOS, PAD


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Widths and regularisation of a translator; `hidden` is shared by encoder, attention and decoder."""

    hidden: int = 256
    embedding: int = 256
    dropout: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        """Check the widths: each direction of the encoder's first layer has half of `hidden`."""
        if self.hidden < 2 or self.hidden % 2 or self.embedding < 1:
            raise ValueError(f"hidden must be even and embedding positive, found {self.hidden} and {self.embedding}")
        if not (0 <= self.dropout < 1 and 0 <= self.label_smoothing < 1):
            raise ValueError(
                f"dropout and label_smoothing must be in [0, 1), found {self.dropout} and {self.label_smoothing}"
            )


class Memory(NamedTuple):
    """What the decoder reads of a source: `states` (B, S, H), their projection `keys` (B, S, H), `padding` (B, S)."""

    states: Tensor
    keys: Tensor
    padding: Tensor


class DecoderState(NamedTuple):
    """What one decoder step hands to the next: the cell's `hidden` and `cell`, and the `attentional` vector, (B, H)."""

    hidden: Tensor
    cell: Tensor
    attentional: Tensor


class Encoder(nn.Module):
    """Embedding, a bidirectional LSTM layer and a unidirectional one."""

    def __init__(self, size: ModelSize, vocabulary: int) -> None:
        """Build for `vocabulary` source tokens."""
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size.embedding, padding_idx=PAD)
        self.dropout = nn.Dropout(size.dropout)
        # Without biases the zero embedding of PAD leaves a zero state at zero, so the backward direction, which
        # meets the padding first, enters the text as if there were none. The embedding can learn what they would do.
        self.both_ways = nn.LSTM(size.embedding, size.hidden // 2, bidirectional=True, batch_first=True, bias=False)
        self.forward_only = nn.LSTM(size.hidden, size.hidden, batch_first=True)

    def forward(self, source: Tensor) -> Tensor:
        """Encode token numbers (B, S) into states (B, S, H)."""
        embedded = self.dropout(self.embedding(source))
        states, _ = self.both_ways(embedded)
        states, _ = self.forward_only(self.dropout(states))
        kept: Tensor = self.dropout(states)
        return kept


class Attention(nn.Module):
    """Additive attention: score = v . tanh(W query + U state)."""

    def __init__(self, size: ModelSize) -> None:
        """Build with a scoring layer of `hidden` units."""
        super().__init__()
        self.key = nn.Linear(size.hidden, size.hidden)
        self.query = nn.Linear(size.hidden, size.hidden, bias=False)
        self.score = nn.Linear(size.hidden, 1, bias=False)

    def remember(self, states: Tensor, padding: Tensor) -> Memory:
        """Project the encoder's states (B, S, H) once for all target steps."""
        return Memory(states, self.key(states), padding)

    def forward(self, query: Tensor, memory: Memory) -> Tensor:
        """Mix the memory's states into a context (B, H) for a query (B, H)."""
        scores = self.score(torch.tanh(self.query(query).unsqueeze(1) + memory.keys)).squeeze(2)
        weights = F.softmax(scores.masked_fill(memory.padding, float("-inf")), dim=1)
        return torch.bmm(weights.unsqueeze(1), memory.states).squeeze(1)


class DecoderStep(nn.Module):
    """One target step: an LSTM cell fed with the last attentional vector, then attention."""

    def __init__(self, size: ModelSize) -> None:
        """Build the cell, the attention and the layer that joins their outputs."""
        super().__init__()
        self.cell = nn.LSTMCell(size.embedding + size.hidden, size.hidden)
        self.attention = Attention(size)
        self.join = nn.Linear(2 * size.hidden, size.hidden)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, embedded: Tensor, state: DecoderState, memory: Memory) -> DecoderState:
        """Advance by one token, embedded as (B, E)."""
        fed = torch.cat([embedded, state.attentional], dim=1)
        hidden, cell = self.cell(fed, (state.hidden, state.cell))
        context = self.attention(hidden, memory)
        attentional = torch.tanh(self.join(torch.cat([hidden, context], dim=1)))
        return DecoderState(hidden, cell, self.dropout(attentional))


class Translator(nn.Module):
    """The whole model; `forward` gives the training loss, `translate` greedy translations."""

    def __init__(self, size: ModelSize, source_vocabulary: int, target_vocabulary: int) -> None:
        """Build for vocabularies of the given numbers of tokens."""
        super().__init__()
        self.label_smoothing = size.label_smoothing
        self.encoder = Encoder(size, source_vocabulary)
        self.bridge = nn.Linear(size.hidden, 2 * size.hidden)
        self.embedding = nn.Embedding(target_vocabulary, size.embedding, padding_idx=PAD)
        self.dropout = nn.Dropout(size.dropout)
        self.step = DecoderStep(size)
        self.output = nn.Linear(size.hidden, target_vocabulary)

    def forward(self, source: Tensor, target_in: Tensor, target_out: Tensor) -> Tensor:
        """Compute the mean cross entropy per target token, padding left out, with teacher forcing.

        Args:
            source: token numbers (B, S), EOS and then PAD at the end; each row has at least one token before PAD.
            target_in: token numbers (B, T) that the decoder reads, from BOS.
            target_out: token numbers (B, T) that it has to predict; at least one is not PAD.
        """
        memory, state = self._encode(source)
        embedded = self.dropout(self.embedding(target_in))
        attentional = []
        for token in embedded.unbind(dim=1):
            state = self.step(token, state, memory)
            attentional.append(state.attentional)
        logits = self.output(torch.stack(attentional, dim=1))
        return F.cross_entropy(
            logits.flatten(0, 1), target_out.flatten(), ignore_index=PAD, label_smoothing=self.label_smoothing
        )

    @torch.no_grad()
    def translate(self, source: Tensor, max_length: int) -> Tensor:
        """Take the likeliest token at each step: (B, max_length) numbers, PAD after EOS. Call `eval()` before."""
        memory, state = self._encode(source)
        token = torch.full_like(source[:, 0], BOS)
        tokens = []
        for _ in range(max_length):
            state = self.step(self.embedding(token), state, memory)
            ended = (token == EOS) | (token == PAD)
            token = self.output(state.attentional).argmax(dim=1).masked_fill(ended, PAD)
            tokens.append(token)
        return torch.stack(tokens, dim=1)

    def _encode(self, source: Tensor) -> tuple[Memory, DecoderState]:
        """Encode a source; the decoder starts from the encoder's state at the last token before the padding."""
        padding = source == PAD
        states = self.encoder(source)
        last = (source.shape[1] - 1 - padding.sum(dim=1)).view(-1, 1, 1).expand(-1, 1, states.shape[2])
        hidden, cell = torch.tanh(self.bridge(states.gather(1, last).squeeze(1))).chunk(2, dim=1)
        return self.step.attention.remember(states, padding), DecoderState(hidden, cell, torch.zeros_like(hidden))
