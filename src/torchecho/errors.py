"""The exceptions that torchecho raises. A message says what was asked, what was found, where, and what to do."""


class EchoError(Exception):
    """Base of every error that torchecho raises on purpose."""


class OptionError(EchoError, ValueError):
    """An option has an unknown name or a value that cannot be used."""


class BudgetError(EchoError, ValueError):
    """No plan keeps the step inside the budget; names the floor and what makes it up."""


class GraphError(EchoError, ValueError):
    """A training graph breaks one of its invariants."""


class ScheduleError(EchoError, ValueError):
    """A schedule reads a storage that is not live, or repeats what may not be repeated."""


class PlanError(EchoError, ValueError):
    """A plan cannot be read, or does not belong to the graph that it is applied to."""


class CaptureError(EchoError, RuntimeError):
    """A training step could not be turned into a training graph."""


class ApplyError(EchoError, RuntimeError):
    """A plan could not be turned into a running step."""


class RecomputeError(EchoError, RuntimeError):
    """A feature map cannot be made again as it was: something that it was made of has changed since."""


class MeasureError(EchoError, RuntimeError):
    """Memory or time could not be measured on this machine."""


class BuildError(EchoError, RuntimeError):
    """A C++ library of torchecho's own could not be built on this machine."""


class EchoWarning(UserWarning):
    """Something was left undone, or a promise was missed; the training goes on."""
