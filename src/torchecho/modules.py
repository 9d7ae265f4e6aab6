"""What the calls that take a model ask of it."""

from torch import nn

from torchecho.errors import OptionError


def checked_module(model: object, call: str) -> nn.Module:
    """Return the model that a call was given.

    Args:
        model: What the user gave.
        call: What the user called with it.

    Raises:
        OptionError: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"{call} takes a torch.nn.Module, found {type(model).__name__}")
    return model
