"""Let the modules of a program run under options while it runs."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torchecho.cli.progress import notice_after
from torchecho.errors import EchoError
from torchecho.options import Options

if TYPE_CHECKING:
    from torch import nn

    from torchecho.engine.trainer import Trainer

_PATIENCE_SECONDS = 2.0
_AHEAD = (
    "in place of torchecho run let the program plan this step before it runs, by"
    " torchecho.optimize(model, ..., largest=example)"
)


@contextlib.contextmanager
def watched(options: Options, trainers: "list[Trainer]", on_refusal: Callable[[EchoError], None]) -> Iterator[None]:
    """Let the modules that a program calls meanwhile run under the options.

    Args:
        options: What the user asked for.
        trainers: Is given what is learnt of the training.
        on_refusal: Called with each error that is raised in the program in place of a plan.
    """
    from torchecho.engine.door import every_module
    from torchecho.engine.modules import compiled_parts, model_bytes
    from torchecho.engine.planning import Surroundings
    from torchecho.engine.trainer import Trainer
    from torchecho.meter import allocator

    def surroundings_of(module: "nn.Module") -> Surroundings | None:
        parts = [module] if options.engine == "compile" else compiled_parts(module)
        if options.engine != "eager" and parts:
            for part in parts:
                _compile(part, options, trainer, on_refusal)
            return None
        return Surroundings(
            options,
            name=name_of(module),
            model_bytes=model_bytes(module),
            optimizer=trainer.bytes_of(module),
            ahead=_AHEAD,
            on_refusal=on_refusal,
            while_planning=lambda name: notice_after(_PATIENCE_SECONDS, f"torchecho: planning {name}", sys.stderr),
        )

    name_of, trainer = _names(), Trainer()
    trainers.append(trainer)
    # Counting begins before the program does: what it frees of memory that was never counted would go unseen.
    with notice_after(_PATIENCE_SECONDS, "torchecho: building what counts memory", sys.stderr):
        allocator.available()
    with trainer.watching(), every_module(surroundings_of):
        yield


def _compile(
    module: "nn.Module", options: Options, trainer: "Trainer", on_refusal: Callable[[EchoError], None]
) -> None:
    """Let a module run under the compile engine, in place of what the program compiled it with."""
    from torchecho.compiled import compiled_call
    from torchecho.engine.installed import install
    from torchecho.engine.modules import model_bytes, uncompiled
    from torchecho.engine.planning import Surroundings, bytes_of_optimizer

    model = uncompiled(module)
    options = dataclasses.replace(options, engine="compile", optimizer=next(iter(trainer.optimizers_of(module)), None))
    surroundings = Surroundings(
        options,
        name=type(model).__name__,
        model_bytes=model_bytes(model),
        optimizer=bytes_of_optimizer(options),
        on_refusal=on_refusal,
    )
    install(model, compiled_call(model, surroundings, dynamic=None))


def _names() -> Callable[["nn.Module"], str]:
    """Return what names modules: by their class, and by a number from the second of a class on."""
    seen: dict[str, int] = {}

    def name_of(module: "nn.Module") -> str:
        name = type(module).__name__
        seen[name] = seen.get(name, 0) + 1
        return name if seen[name] == 1 else f"{name} {seen[name]}"

    return name_of
