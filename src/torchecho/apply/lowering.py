"""Run a planned graph module as it is: op by op, in exact order, each value freed after its last use."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch.fx.graph import _BoxedCodeGen  # private: the calling convention that lets saved tensors die at last use


def lower_eager(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Return a function that runs the module and empties the list of inputs that it is given.

    The generated code drops each name after its last use, and the caller keeps no argument alive, so that every storage
    dies when the simulator says it does.
    """
    del example_inputs
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    forward = module.forward

    def run(inputs: list[Any]) -> Any:
        return forward(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]  # how AOTAutograd recognises the convention
    return run
