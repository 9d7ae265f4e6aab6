"""Carry errors through Dynamo, which wraps every exception of a backend that is not its own."""

from torch._dynamo.exc import ShortenTraceback  # private: the one class of errors that Dynamo hands on unchanged

from torchecho.errors import EchoError


def through_dynamo(error: EchoError) -> EchoError:
    """Return the error as one that Dynamo hands on unchanged instead of wrapping it."""
    kind = type(error)
    if isinstance(error, ShortenTraceback):
        return error
    # ShortenTraceback's own initialiser wants a frame to shorten the traceback to; there is none to show.
    body = {"__module__": kind.__module__, "__init__": Exception.__init__, "first_useful_frame": None}
    made = type(kind.__name__, (kind, ShortenTraceback), body)(str(error))
    assert isinstance(made, EchoError)
    return made


def without_dynamo(error: EchoError) -> EchoError:
    """Return an error that came through Dynamo as its plain class, free of Dynamo's advice and frames."""
    if not isinstance(error, ShortenTraceback):
        return error
    plain = type(error).__bases__[0]
    made = plain(str(error).split("\n\nSet TORCHDYNAMO_VERBOSE", maxsplit=1)[0])
    assert isinstance(made, EchoError)
    return made
