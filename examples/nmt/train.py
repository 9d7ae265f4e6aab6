"""Train the translator on parallel text: `python examples/nmt/train.py --help`."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

if not __package__:  # started as a script: let the relative imports below find the package that this file is in
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = Path(__file__).resolve().parent.name

from .batches import (
    DEFAULT_BUCKETS,
    LEVELS,
    PAD,
    Batch,
    Bucket,
    Vocabularies,
    build_vocabularies,
    fill_buckets,
    make_batches,
    make_validation_batches,
)
from .corpus import CorpusError, Pair, read_django, read_tsv, split
from .model import ModelSize, Translator

EXAMPLE = """example:
  python examples/nmt/train.py --steps 200 --batch 64
  python examples/nmt/train.py --language de --hidden 128 --buckets 48:48
  python examples/nmt/train.py --corpus my.tsv --level word --buckets 24:24 48:48
"""


def make_model(size: ModelSize, vocab: Vocabularies, seed: int = 0) -> Translator:
    """Build a translator after seeding torch's global generator, so that weights and dropout masks repeat."""
    torch.manual_seed(seed)
    return Translator(size, len(vocab.source), len(vocab.target))


def make_optimizer(model: nn.Module, rate: float = 3e-3) -> torch.optim.Optimizer:
    """Make the Adam optimizer that the training loop uses."""
    return torch.optim.Adam(model.parameters(), lr=rate)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, clip: float = 1.0) -> Tensor:
    """Run one training step with the gradient's norm clipped; return the loss, detached."""
    optimizer.zero_grad(set_to_none=True)
    loss: Tensor = model(*batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def validation_loss(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Compute the mean loss per token over all batches, without dropout."""
    training = model.training
    model.eval()
    total, num_tokens = 0.0, 0
    for batch in batches:
        count = int((batch.target_out != PAD).sum())
        total += float(model(*batch)) * count
        num_tokens += count
    model.train(training)
    return total / num_tokens


def greedy_translations(model: Translator, batch: Batch, vocab: Vocabularies, count: int) -> list[tuple[str, str, str]]:
    """Translate the first rows of a batch; return (source, reference, translation) texts."""
    training = model.training
    model.eval()
    translated = model.translate(batch.source[:count], batch.target_out.shape[1])
    model.train(training)
    return [
        (vocab.source.decode(source), vocab.target.decode(reference), vocab.target.decode(translation))
        for source, reference, translation in zip(
            batch.source.tolist(), batch.target_out.tolist(), translated.tolist(), strict=False
        )
    ]


def bucket(text: str) -> Bucket:
    """Read a bucket's `SOURCE:TARGET` lengths."""
    try:
        size = Bucket(*map(int, text.split(":")))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"expected SOURCE:TARGET lengths such as 48:48, found {text!r}") from None
    if min(size) < 2:
        raise argparse.ArgumentTypeError(f"a bucket holds at least 2 tokens a side, found {text!r}")
    return size


def positive(text: str) -> int:
    """Read a whole number above zero."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above zero, found {text!r}")
    return int(text)


def device(text: str) -> torch.device:
    """Read the name of a device that this machine has."""
    try:
        return torch.empty(0, device=text).device
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for a GPU
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {str(error).splitlines()[0]}") from None


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Train an attention LSTM translator on parallel text.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = parser.add_argument_group("text")
    text.add_argument(
        "--corpus",
        type=Path,
        metavar="FILE.tsv",
        help="SOURCE<TAB>TARGET lines; default: Django's English messages and their translations",
    )
    text.add_argument("--language", default="vi", help="of Django's translations: vi (default), de, ...")
    text.add_argument("--level", choices=LEVELS, default="character", help="what a token is (default: %(default)s)")
    text.add_argument(
        "--buckets",
        type=bucket,
        nargs="+",
        default=DEFAULT_BUCKETS,
        metavar="S:T",
        help="padded lengths of source and target in tokens (default: 48:48 96:96)",
    )
    model = parser.add_argument_group("model")
    model.add_argument("--hidden", type=positive, default=256, help="LSTM and attention units (default: %(default)s)")
    model.add_argument("--embedding", type=positive, default=256, help="embedding width (default: %(default)s)")
    model.add_argument("--dropout", type=float, default=0.1, help="(default: %(default)s)")
    model.add_argument("--label-smoothing", type=float, default=0.0, help="(default: %(default)s)")
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=positive, default=200, help="(default: %(default)s)")
    training.add_argument("--batch", type=positive, default=64, help="rows of a batch (default: %(default)s)")
    training.add_argument("--rate", type=float, default=3e-3, help="Adam's learning rate (default: %(default)s)")
    training.add_argument("--seed", type=int, default=0, help="of every random choice (default: %(default)s)")
    training.add_argument("--log-every", type=positive, default=10, metavar="STEPS", help="(default: %(default)s)")
    training.add_argument("--device", type=device, default="cpu", help="such as cpu or cuda (default: %(default)s)")
    return parser


def train(arguments: argparse.Namespace, size: ModelSize, pairs: Sequence[Pair]) -> None:
    """Train as the arguments say and print losses, the validation loss and a few translations."""
    training_pairs, validation_pairs = split(pairs, seed=arguments.seed)
    vocab = build_vocabularies(training_pairs, arguments.level)
    training = fill_buckets(training_pairs, vocab, arguments.buckets)
    validation = fill_buckets(validation_pairs, vocab, arguments.buckets)
    model = make_model(size, vocab, arguments.seed).to(arguments.device)
    print(
        f"{len(training)} training and {len(validation)} validation pairs "
        f"({training.num_dropped + validation.num_dropped} too long), {len(vocab.source)} source and "
        f"{len(vocab.target)} target tokens, {sum(p.numel() for p in model.parameters()):,} parameters"
    )

    def on_device(batch: Batch) -> Batch:
        return Batch(*(tensor.to(arguments.device) for tensor in batch))

    run_steps(model, map(on_device, make_batches(training, arguments.batch, arguments.seed)), arguments)
    held_out = [on_device(batch) for batch in make_validation_batches(validation, arguments.batch)]
    print(f"validation loss {validation_loss(model, held_out):.3f}")
    for source, reference, translation in greedy_translations(model, held_out[0], vocab, count=4):
        print(f"\n  source       {source}\n  reference    {reference}\n  translation  {translation}")


def run_steps(model: nn.Module, batches: Iterable[Batch], arguments: argparse.Namespace) -> None:
    """Run the training steps and print a line now and then."""
    optimizer = make_optimizer(model, arguments.rate)
    start = perf_counter()
    for step, batch in zip(range(1, arguments.steps + 1), batches, strict=False):
        loss = train_step(model, optimizer, batch)
        if step % arguments.log_every == 0 or step == arguments.steps:
            print(f"step {step:5d}  loss {float(loss):.3f}  {(perf_counter() - start) / step:.3f} s/step", flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code: 0 done, 130 interrupted. Wrong usage exits with 2."""
    parser = make_parser()
    arguments = parser.parse_args(words)
    try:
        size = ModelSize(arguments.hidden, arguments.embedding, arguments.dropout, arguments.label_smoothing)
    except ValueError as error:
        parser.error(str(error))
    try:
        pairs = read_tsv(arguments.corpus) if arguments.corpus else read_django(arguments.language)
        train(arguments, size, pairs)
    except CorpusError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was saved", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
