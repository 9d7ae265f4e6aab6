"""Vocabularies, length buckets and padded batches: every batch of a bucket has the same shape."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .corpus import CorpusError, Pair

PAD, BOS, EOS, UNK = range(4)
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
LEVELS = ("character", "word")


class Bucket(NamedTuple):
    """The padded lengths of a batch, in tokens; each side keeps one of them for EOS."""

    source_steps: int
    target_steps: int


DEFAULT_BUCKETS = (Bucket(48, 48), Bucket(96, 96))


class Batch(NamedTuple):
    """Token numbers: `source` (B, S), `target_in` (B, T) from BOS, `target_out` (B, T) up to EOS; int64, PAD after."""

    source: Tensor
    target_in: Tensor
    target_out: Tensor


class Example(NamedTuple):
    """A pair as token numbers, without BOS and EOS."""

    source: list[int]
    target: list[int]


class Vocabulary:
    """Tokens and their numbers; the first four are PAD, BOS, EOS and UNK."""

    def __init__(self, texts: Iterable[str], level: str = "character", limit: int = 20_000) -> None:
        """Number the `limit` most frequent tokens of `texts`, whole words or single characters."""
        if level not in LEVELS:
            raise ValueError(f"level {level!r} is not known; it is one of {', '.join(LEVELS)}")
        self.level = level
        counts = Counter(token for text in texts for token in self._tokens(text))
        ranked = sorted(counts, key=lambda token: (-counts[token], token))
        self.tokens = (*SPECIAL, *ranked[:limit])
        self._numbers = {token: number for number, token in enumerate(self.tokens) if number > UNK}

    def __len__(self) -> int:
        """Count the tokens, the four special ones included."""
        return len(self.tokens)

    def encode(self, text: str) -> list[int]:
        """Turn text into token numbers; an unknown token becomes UNK."""
        return [self._numbers.get(token, UNK) for token in self._tokens(text)]

    def decode(self, numbers: Iterable[int]) -> str:
        """Turn token numbers into text up to the first EOS; PAD and BOS are left out."""
        tokens = []
        for number in numbers:
            if number == EOS:
                break
            if number not in (PAD, BOS):
                tokens.append(self.tokens[number])
        return self._joint.join(tokens)

    @property
    def _joint(self) -> str:
        return "" if self.level == "character" else " "

    def _tokens(self, text: str) -> list[str]:
        return list(text) if self.level == "character" else text.split()


class Vocabularies(NamedTuple):
    """The two vocabularies of a corpus."""

    source: Vocabulary
    target: Vocabulary


def build_vocabularies(pairs: Sequence[Pair], level: str = "character", limit: int = 20_000) -> Vocabularies:
    """Build both vocabularies; give the training pairs only, so that validation meets unknown tokens honestly."""
    return Vocabularies(
        Vocabulary((pair.source for pair in pairs), level, limit),
        Vocabulary((pair.target for pair in pairs), level, limit),
    )


@dataclass(frozen=True, slots=True)
class Buckets:
    """Examples sorted by the smallest bucket that holds them, and how many fitted none."""

    examples: dict[Bucket, list[Example]]
    num_dropped: int

    def __len__(self) -> int:
        """Count the examples that fitted a bucket."""
        return sum(map(len, self.examples.values()))


def fill_buckets(pairs: Sequence[Pair], vocab: Vocabularies, sizes: Sequence[Bucket] = DEFAULT_BUCKETS) -> Buckets:
    """Sort pairs into the smallest bucket that holds both sides with their EOS.

    Raises:
        CorpusError: no pair fits any bucket.
    """
    examples: dict[Bucket, list[Example]] = {size: [] for size in sorted(sizes, key=lambda size: (sum(size), size))}
    num_dropped = 0
    for pair in pairs:
        example = Example(vocab.source.encode(pair.source), vocab.target.encode(pair.target))
        held = [size for size in examples if len(example.source) < size[0] and len(example.target) < size[1]]
        if held:
            examples[held[0]].append(example)
        else:
            num_dropped += 1
    buckets = Buckets({size: rows for size, rows in examples.items() if rows}, num_dropped)
    if not buckets.examples:
        largest = max(sizes, key=sum)
        raise CorpusError(f"none of {len(pairs)} pairs fits a bucket; the largest is {largest[0]}:{largest[1]} tokens")
    return buckets


def make_batches(buckets: Buckets, batch: int, seed: int = 0) -> Iterator[Batch]:
    """Yield training batches without end, in an order that `seed` fixes.

    Each epoch shuffles the examples of every bucket and then the batches. The last batch of a bucket is filled up
    with rows from its beginning, so that all its batches have `batch` rows.
    """
    order = random.Random(seed)
    while True:
        epoch = []
        for size, examples in buckets.examples.items():
            rows = order.sample(examples, len(examples))
            rows += [rows[index % len(examples)] for index in range(-len(rows) % batch)]
            epoch += [(size, rows[start : start + batch]) for start in range(0, len(rows), batch)]
        order.shuffle(epoch)
        yield from (_pad(rows, size) for size, rows in epoch)


def make_validation_batches(buckets: Buckets, batch: int) -> list[Batch]:
    """Make batches of `batch` rows that hold each example once; rows without a target fill up the last ones."""
    batches = []
    for size, examples in buckets.examples.items():
        fill = [Example([], [])] * (-len(examples) % batch)
        rows = [*examples, *fill]
        batches += [_pad(rows[start : start + batch], size) for start in range(0, len(rows), batch)]
    return batches


def fixed_batch(
    batch: int,
    source_steps: int,
    target_steps: int,
    vocab: Vocabularies,
    seed: int = 0,
    pairs: Sequence[Pair] = (),
) -> Batch:
    """Make one batch without any padding, for measurements.

    Each row is a random pair of `pairs`, prolonged by further ones where a side is too short, and cut to the given
    lengths; so it has no EOS. Without `pairs` the tokens are drawn uniformly.
    """
    order = random.Random(seed)
    examples = [Example(vocab.source.encode(pair.source), vocab.target.encode(pair.target)) for pair in pairs]
    rows = []
    for _ in range(batch):
        source: list[int] = []
        target: list[int] = []
        while len(source) < source_steps or len(target) < target_steps:
            example = order.choice(examples) if examples else _random_example(vocab, order)
            source += example.source
            target += example.target
        rows.append(Example(source[:source_steps], target[:target_steps]))
    inputs = [[BOS, *row.target[:-1]] for row in rows]
    outputs = [row.target for row in rows]
    return Batch(torch.tensor([row.source for row in rows]), torch.tensor(inputs), torch.tensor(outputs))


def _random_example(vocab: Vocabularies, order: random.Random) -> Example:
    return Example(*([order.randrange(UNK, len(side))] for side in vocab))


def _pad(examples: Sequence[Example], size: Bucket) -> Batch:
    """Pad examples to the lengths of a bucket. A row without a target is a filler: it has nothing to predict."""
    sources = [[*row.source, EOS] for row in examples]
    inputs = [[BOS, *row.target] for row in examples]
    outputs = [[*row.target, EOS] if row.target else [] for row in examples]
    return Batch(
        _rectangle(sources, size.source_steps),
        _rectangle(inputs, size.target_steps),
        _rectangle(outputs, size.target_steps),
    )


def _rectangle(rows: Sequence[Sequence[int]], steps: int) -> Tensor:
    return torch.tensor([[*row, *[PAD] * (steps - len(row))] for row in rows])
