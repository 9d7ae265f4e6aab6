"""What every test can rely on: caches of its own, the same random draws, and nothing compiled by another test."""

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# The same examples on every run and machine; a slow machine is not a failure.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Keep what is cached away from the user's own cache, and share it between tests."""
    folder = str(tmp_path_factory.mktemp("torchecho-cache"))
    before = os.environ.get("TORCHECHO_CACHE")
    os.environ["TORCHECHO_CACHE"] = folder
    yield folder
    if before is None:
        del os.environ["TORCHECHO_CACHE"]
    else:
        os.environ["TORCHECHO_CACHE"] = before


@pytest.fixture(autouse=True)
def fresh_torch() -> Iterator[None]:
    """Seed torch and forget compiled code; a test that has not imported torch pays nothing."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """Let an interrupt reach this process, and those that it starts, also where the tests run with it ignored."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)
