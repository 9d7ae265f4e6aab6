"""The dispatch mode that ours are: it leaves compiled parts of the program alone, and costs as little as it can."""

from torch.utils._python_dispatch import TorchDispatchMode


class LightMode(TorchDispatchMode):
    """A dispatch mode that compiled parts of the program do not notice: they stay compiled, and are not looked into."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: what guards a mode's calls from Dynamo costs a microsecond a call."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled parts of the program stay compiled, and keep what they save."""
        return True
