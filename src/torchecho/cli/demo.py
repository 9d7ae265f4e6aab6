"""``torchecho demo``: the attention LSTM translator on real text, untouched and under a budget, side by side."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from torchecho.cli.console import JsonPath, check_file, make_console, write_json
from torchecho.cli.progress import open_progress
from torchecho.errors import OptionError
from torchecho.units import format_bytes, format_overhead, format_seconds

if TYPE_CHECKING:
    from torchecho.bench.demo import Demo
    from torchecho.report.results import ResultRow


def demo(  # noqa: PLR0913, PLR0917 - one argument for each option of the command line
    memory_budget: Annotated[
        str, typer.Option(metavar="BYTES", help="As '64MiB', or a fraction of the untouched step's peak.")
    ] = "0.4",
    steps: Annotated[int, typer.Option(min=2, help="Training steps of each run.")] = 30,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 64,
    language: Annotated[str, typer.Option(help="Of Django's translations: vi, de, ...")] = "vi",
    corpus: Annotated[str | None, typer.Option(metavar="FILE.tsv", help="SOURCE<TAB>TARGET lines to train on.")] = None,
    bucket: Annotated[str, typer.Option(metavar="S:T", help="Padded lengths in characters.")] = "24:24",
    hidden: Annotated[int, typer.Option(min=2, help="LSTM units, an even number.")] = 256,
    json_path: JsonPath = None,
) -> None:
    """Train a translator untouched and under a memory budget; show peak, time and loss side by side.

    Example: torchecho demo --memory-budget 64MiB --language de
    """
    from torchecho.bench.demo import DemoSetup, run_demo
    from torchecho.cli.results import make_results, print_results

    if hidden % 2:
        raise OptionError(f"demo: --hidden must be even, each direction of the encoder has half of it; got {hidden}")
    setup = DemoSetup(memory_budget, steps, batch, language, corpus, _read_bucket(bucket), hidden)
    check_file("--json", json_path)
    console = make_console(json_path)
    with open_progress(console) as tell:
        shown = run_demo(setup, tell)
    print_results(console, shown.rows)
    for line in [*_curves(shown), "", *verdicts(shown)]:
        console.print(line, markup=False, soft_wrap=True)
    if json_path is not None:
        write_json(json_path, make_results(shown.rows).to_dict())


def _read_bucket(text: str) -> tuple[int, int]:
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) >= 2 for part in parts):
        raise OptionError(f"demo: --bucket takes SOURCE:TARGET lengths of at least 2, such as 24:24; got {text!r}")
    return int(parts[0]), int(parts[1])


def _curves(shown: "Demo") -> list[str]:
    from torchecho.report.curves import plot_curves

    return ["loss by step", *plot_curves({"untouched": shown.untouched.losses, "budget": shown.planned.losses})]


def verdicts(shown: "Demo") -> Iterator[str]:
    """Yield what the demo shows, a sentence a line."""
    yield from _peak_verdict(shown)
    yield from _loss_verdict(shown)
    ours, reference = shown.planned.seconds_median, shown.reference.seconds_median
    if ours and reference:
        foreseen = format_overhead(shown.planned.overhead_predicted or 0.0)
        yield (
            f"step   {format_seconds(ours)}, {format_seconds(reference)} with nothing recomputed;"
            f" {foreseen} was predicted"
        )
        yield "       (runs one after the other, so load on the machine shows; torchecho bench times pairs of steps)"
    yield from _batch_verdict(shown)


def _peak_verdict(shown: "Demo") -> Iterator[str]:
    before, peak, predicted = shown.untouched.peak_bytes, shown.planned.peak_bytes, shown.planned.predicted_peak_bytes
    if before and peak and predicted:
        inside = "inside" if peak <= shown.budget_bytes else "OVER"
        yield (
            f"peak   {format_bytes(before)} untouched, {format_bytes(peak)} under the budget: {before / peak:.2f} times"
            f" less, {inside} {format_bytes(shown.budget_bytes)}"
        )
        yield f"       {format_bytes(predicted)} was predicted ({peak / predicted * 100 - 100:+.2f} %)"


def _loss_verdict(shown: "Demo") -> Iterator[str]:
    losses = shown.planned.losses
    equal = sum(ours == theirs for ours, theirs in zip(losses, shown.reference.losses, strict=True))
    yield f"loss   {equal} of {len(losses)} equal those of the same lowering with nothing recomputed, to the last bit"
    furthest = max(abs(ours - theirs) for ours, theirs in zip(losses, shown.untouched.losses, strict=True))
    yield f"       furthest from eager PyTorch, which adds up in another order inside nn.LSTM: {furthest:.1e}"


def _batch_verdict(shown: "Demo") -> Iterator[str]:
    ours, theirs, budget = shown.largest_planned, shown.largest_untouched, format_bytes(shown.budget_bytes)
    yield f"batch  inside {budget} torchecho trains {_batch(ours)}, at most"
    if shown.roomy_planned is not None:
        yield f"       and {_batch(shown.roomy_planned)}"
    if theirs is None:
        yield "       eager PyTorch trains no batch at all"
    elif ours.batch and theirs.batch:
        yield f"       eager PyTorch trains {_batch(theirs)}, at most: {ours.batch / theirs.batch:.1f} times fewer"


def _batch(row: "ResultRow") -> str:
    return f"a batch of {row.batch}, {row.samples_per_second or 0:.0f} samples/s"
