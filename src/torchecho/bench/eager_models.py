"""The other models of the eager workload: a language model of recurrent layers, and a chain of tiny ops."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchecho.bench.training import Training

_DROPOUT = 0.2
_CHAIN_WIDTH = 16
_OPS_OF_A_LINK = 4


class LanguageModel(nn.Module):
    """Embedding, a two-layer LSTM with dropout and a projection onto the vocabulary; the call returns the loss."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        """Build for `vocabulary` words and `hidden` units, which is the width of the embedding too."""
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.dropout = nn.Dropout(_DROPOUT)
        self.layers = nn.LSTM(hidden, hidden, num_layers=2, dropout=_DROPOUT)
        self.output = nn.Linear(hidden, vocabulary)

    def forward(self, words: Tensor, next_words: Tensor) -> Tensor:
        """Return the mean cross entropy of word numbers (T, B) that follow others (T, B)."""
        states, _ = self.layers(self.dropout(self.embedding(words)))
        logits = self.output(self.dropout(states))
        return F.cross_entropy(logits.flatten(0, 1), next_words.flatten())


class Chain(nn.Module):
    """A long chain of elementwise ops on small tensors: a step whose time is all calls."""

    def __init__(self, num_ops: int) -> None:
        """Build for about `num_ops` ops in the forward."""
        super().__init__()
        self.num_links = num_ops // _OPS_OF_A_LINK
        self.weight = nn.Parameter(torch.rand(_CHAIN_WIDTH, _CHAIN_WIDTH))

    def forward(self, features: Tensor) -> Tensor:
        """Return one number made of features (16, 16)."""
        for _ in range(self.num_links):
            features = torch.sigmoid(torch.tanh(features) * self.weight) + self.weight
        return features.sum()


def make_language_model(steps: int, batch: int, hidden: int, vocabulary: int, seed: int) -> Training:
    """Build the language model and one batch of random words.

    Args:
        steps: T, words of each row.
        batch: B, rows.
        hidden: H, units of each layer.
        vocabulary: Different words.
        seed: Of the parameters and of the words.
    """
    torch.manual_seed(seed)
    model = LanguageModel(vocabulary, hidden)
    words = torch.randint(vocabulary, (steps + 1, batch))
    return Training(model, torch.optim.Adam(model.parameters()), (words[:-1].clone(), words[1:].clone()))
