"""Swap a model's recurrent modules for torchecho's and back, in place, with the same parameters."""

from collections.abc import Callable

from torch import nn

from torchecho.modules import checked_module
from torchecho.nn.gru import GRU
from torchecho.nn.lstm import LSTM
from torchecho.nn.module import RecurrentModule
from torchecho.nn.rnn import RNN

_OURS: dict[type[nn.Module], type[RecurrentModule]] = {nn.LSTM: LSTM, nn.GRU: GRU, nn.RNN: RNN}
_THEIRS: dict[type[nn.Module], type[nn.RNNBase]] = {LSTM: nn.LSTM, GRU: nn.GRU, RNN: nn.RNN}
_THEIR_OWN = ("mode", "_flat_weights", "_flat_weight_refs", "_flat_weights_names", "_all_weights")


def convert(model: nn.Module, *, stash: str = "auto") -> nn.Module:
    """Replace every torch.nn.LSTM, GRU and RNN in the model by torchecho's.

    Parameters, hooks and names stay the same objects, so optimizers and state_dicts stay valid. Subclasses and
    parametrized modules are left alone, since they may compute something else.

    Args:
        model: Changed in place.
        stash: Stash mode of the new modules; a kind of layer that has no such mode keeps ``"auto"``.

    Returns:
        The model; what replaces it if it is a recurrent module itself.

    Raises:
        OptionError: the model is no module, or no kind of layer has such a mode.
    """
    checked_module(model, "convert")
    LSTM.checked_stash(stash)  # which has every mode that any kind has
    return _swap(model, lambda module: _to_ours(module, stash))


def revert(model: nn.Module) -> nn.Module:
    """Replace every torchecho LSTM, GRU and RNN in the model by torch.nn's: the inverse of `convert`.

    Returns:
        The model; what replaces it if it is a recurrent module itself.

    Raises:
        OptionError: the model is no module.
    """
    return _swap(checked_module(model, "revert"), _to_theirs)


def _swap(model: nn.Module, replaced: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Replace submodules; one that stands in several places is replaced by one in all of them."""
    swapped = {module: replaced(module) for module in model.modules()}
    for parent in list(swapped):
        for name, child in list(parent._modules.items()):  # noqa: SLF001 - named_children() skips the second place
            if child is not None and swapped[child] is not child:
                setattr(parent, name, swapped[child])
    return swapped[model]


def _to_ours(module: nn.Module, stash: str) -> nn.Module:
    kind = _OURS.get(type(module))
    if kind is None:
        return module
    made = kind.__new__(kind)
    made.__dict__.update({name: value for name, value in module.__dict__.items() if name not in _THEIR_OWN})
    made.stash = stash if stash in kind.modes() else "auto"
    return made


def _to_theirs(module: nn.Module) -> nn.Module:
    kind = _THEIRS.get(type(module))
    if kind is None:
        return module
    assert isinstance(module, RecurrentModule)
    made = kind.__new__(kind)
    made.__dict__.update({name: value for name, value in module.__dict__.items() if name != "stash"})
    made.mode = f"RNN_{module.nonlinearity.upper()}" if isinstance(module, RNN) else kind.__name__
    made._all_weights = module.weight_names  # noqa: SLF001 - what torch.nn's own construction sets
    made._flat_weights_names = [name for names in module.weight_names for name in names]  # noqa: SLF001 - as above
    made._init_flat_weights()  # noqa: SLF001 - as above
    return made
