import contextlib
import importlib
import sys

import pytest

from torchecho.engine.imports import from_import_of
from torchecho.errors import EchoError


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "module_of_test_imports.py").write_text("value = 1")
    (tmp_path / "broken_of_test_imports.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "module_of_test_imports"
    sys.modules.pop("module_of_test_imports", None)


@contextlib.contextmanager
def noting(events):
    events.append(("in", sys.modules["module_of_test_imports"].value))
    yield
    events.append("out")


def test_the_context_begins_with_the_import(module):
    events, finders = [], list(sys.meta_path)
    with from_import_of(module, lambda: noting(events)):
        assert events == []
        found = importlib.import_module(module)
        assert events == [("in", 1)]
        importlib.reload(found)
        assert events == [("in", 1)]
    assert events == [("in", 1), "out"]
    assert sys.meta_path == finders


def test_what_is_imported_already_begins_at_once(module):
    importlib.import_module(module)
    events = []
    with from_import_of(module, lambda: noting(events)):
        assert events == [("in", 1)]
    assert events == [("in", 1), "out"]


def test_what_is_never_imported_never_begins(module):
    events, finders = [], list(sys.meta_path)
    with from_import_of(module, lambda: noting(events)), contextlib.suppress(ZeroDivisionError):
        importlib.import_module("broken_of_test_imports")
    assert events == []
    assert sys.meta_path == finders


def test_an_import_that_fails_begins_nothing(module):
    events = []
    with from_import_of("broken_of_test_imports", lambda: noting(events)):
        with pytest.raises(ZeroDivisionError):
            importlib.import_module("broken_of_test_imports")
        with pytest.raises(ZeroDivisionError):
            importlib.import_module("broken_of_test_imports")
    assert events == []


def test_a_context_that_cannot_begin_is_no_failure_of_the_program(module):
    def fails():
        raise RuntimeError("no")

    with from_import_of(module, fails), pytest.raises(EchoError, match=r"cannot watch .* RuntimeError: no"):
        importlib.import_module(module)
