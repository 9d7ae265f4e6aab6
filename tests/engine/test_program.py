"""A program run by torchecho against the same program run by the interpreter alone: same output, same exit code."""

import contextlib
import os
import subprocess
import sys
import zipfile

import pytest

from torchecho.engine.program import Outcome, Program, run_program
from torchecho.errors import BudgetError, OptionError, RecomputeError

RUN = """
import contextlib, sys
from torchecho.engine.program import Program, run_program
is_module = sys.argv[1] == "-m"
name, *args = sys.argv[1 + is_module:]
outcome = run_program(Program(name, tuple(args), is_module), contextlib.nullcontext())
if outcome.error:
    sys.exit(f"error: {outcome.error}")
sys.exit(outcome.exit_code)
"""


@pytest.fixture
def as_before(monkeypatch):
    """Put back what a program that runs in this process takes over."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def both(folder, *words, env=None):
    """Run a program by the interpreter and by torchecho, and return what each printed and ended with."""
    environment = {**os.environ, **(env or {})}
    plain, ours = (
        subprocess.run(
            [sys.executable, *command, *words], cwd=folder, capture_output=True, text=True, check=False, env=environment
        )
        for command in ([], ["-c", RUN])
    )
    return plain, ours


def assert_same(plain, ours):
    assert ours.stdout == plain.stdout
    assert ours.stderr == plain.stderr
    assert ours.returncode == plain.returncode


SEEN = """
import sys, os, pickle, helper
class Here:
    pass
print(__name__, __file__, sys.argv, sys.path[0], __package__, __spec__, __cached__, type(__loader__).__name__)
print(sorted(globals()), helper.__file__)
print(type(pickle.loads(pickle.dumps(Here()))) is Here, sys.modules["__main__"].Here is Here)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text(SEEN)
    (tmp_path / "sub" / "helper.py").write_text("")
    (tmp_path / "link.py").symlink_to(tmp_path / "sub" / "train.py")
    return tmp_path


@pytest.mark.parametrize("name", ["sub/train.py", "./sub/train.py", "sub/../sub/train.py", "link.py"])
def test_a_script_sees_what_it_always_sees(folder, name):
    plain, ours = both(folder, name, "--memory-budget", "-m", "x y")
    assert "True True" in plain.stdout
    assert_same(plain, ours)


def test_a_script_of_an_absolute_path(folder):
    assert_same(*both(folder, str(folder / "sub" / "train.py"), "1"))


def test_a_safe_path_stays_safe(folder):
    (folder / "sub" / "safe.py").write_text("import sys; print([p for p in sys.path if 'sub' in p])")
    plain, ours = both(folder, "sub/safe.py", env={"PYTHONSAFEPATH": "1"})
    assert plain.stdout == "[]\n"
    assert_same(plain, ours)


def test_a_module_sees_what_it_always_sees(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("print('package')")
    text = (
        "import sys; from . import part; print(__name__, __file__, sys.argv, sys.path[0], __package__, __spec__.name)"
    )
    (package / "train.py").write_text(text)
    (package / "__main__.py").write_text(text)
    (package / "part.py").write_text("")
    assert_same(*both(tmp_path, "-m", "package.train", "--lr", "1"))
    assert_same(*both(tmp_path, "-m", "package", "-m"))


def test_a_folder_and_an_archive(tmp_path):
    (tmp_path / "app").mkdir()
    text = "import sys; print(__name__, __file__, sys.argv, sys.path[0], __package__, __spec__.name, __cached__)"
    (tmp_path / "app" / "__main__.py").write_text(text)
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", text)
    assert_same(*both(tmp_path, "app", "1"))
    assert_same(*both(tmp_path, "app/", "1"))
    assert_same(*both(tmp_path, "app.zip", "1"))


def test_a_folder_without_a_program(tmp_path, as_before):
    outcome = run_program(Program(str(tmp_path)), contextlib.nullcontext())
    assert isinstance(outcome.error, OptionError)
    assert "has no __main__.py" in str(outcome.error)


@pytest.mark.parametrize(
    "text",
    [
        "raise SystemExit",
        "import sys; sys.exit(7)",
        "import sys; sys.exit(-1)",
        "import sys; sys.exit(True)",
        "import sys; sys.exit('no data')",
        "import sys; sys.exit(['no', 'data'])",
        "import os; os._exit(5)",
        "import sys; sys.stdout.close()",
        "import atexit; atexit.register(lambda: print('bye')); print('hello')",
        "def f(n):\n    return 1 / n\nf(0)",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('chained') from error",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    {}['x']",
        "raise ExceptionGroup('many', [ValueError('a'), TypeError('b')])",
        "import sys\nsys.excepthook = lambda kind, error, trace: print('hook', kind.__name__, trace.tb_lineno)\n1 / 0",
        "x = (1,\n",
        "import no_such_module",
        "# -*- coding: latin-1 -*-\nprint('caf\u00e9')",
        "from __future__ import annotations\ndef f(x: no_such_name): ...\nprint(f.__annotations__)",
        "import warnings; warnings.warn('old', DeprecationWarning)",
        "import inspect\ndef f(): ...\nprint(inspect.getsource(f))",
    ],
)
def test_every_end(tmp_path, text):
    (tmp_path / "train.py").write_text(text)
    assert_same(*both(tmp_path, "train.py"))


def test_an_error_inside_a_module_shows_the_frames_of_the_program_only(tmp_path):
    (tmp_path / "train.py").write_text("def f():\n    1 / 0\nf()")
    plain, ours = both(tmp_path, "-m", "train")
    started = plain.stderr.index(f'  File "{tmp_path}')
    assert ours.stderr == "Traceback (most recent call last):\n" + plain.stderr[started:]
    assert ours.returncode == plain.returncode == 1


def test_workers_of_multiprocessing_find_the_program(tmp_path):
    (tmp_path / "train.py").write_text(
        "import multiprocessing\n"
        "class Job:\n    def __init__(self, n): self.n = n\n"
        "def work(job): return job.n + 1\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(work, [Job(1), Job(2)]))\n"
    )
    plain, ours = both(tmp_path, "train.py")
    assert plain.stdout == "[2, 3]\n"
    assert_same(plain, ours)


def test_an_interrupt_shows_where_and_is_130(tmp_path):
    (tmp_path / "train.py").write_text("raise KeyboardInterrupt")
    plain, ours = both(tmp_path, "train.py")
    assert ours.stderr == plain.stderr
    assert ours.returncode == 130


@pytest.mark.parametrize("name", ["absent", "package.absent", "absent.part", "train."])
def test_a_module_that_is_not_there(tmp_path, as_before, monkeypatch, name):
    (tmp_path / "package").mkdir()
    monkeypatch.chdir(tmp_path)
    outcome = run_program(Program(name, is_module=True), contextlib.nullcontext())
    assert isinstance(outcome.error, OptionError)
    assert repr(name) in str(outcome.error)


def test_a_module_whose_package_imports_what_is_not_there(tmp_path, as_before, monkeypatch, capsys):
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text("import no_such_module")
    monkeypatch.chdir(tmp_path)
    outcome = run_program(Program("broken_package.train", is_module=True), contextlib.nullcontext())
    assert outcome == Outcome(1)
    assert "No module named 'no_such_module'" in capsys.readouterr().err


def test_a_script_that_is_not_there():
    with pytest.raises(OptionError, match=r"no file 'absent\.py'"):
        Program("absent.py").check()
    Program("absent.py", is_module=True).check()


@pytest.mark.parametrize(
    ("kind", "is_ours"), [(BudgetError, True), (OptionError, True), (RecomputeError, False), (RuntimeError, False)]
)
def test_errors_of_torchecho_are_handed_on(tmp_path, as_before, capsys, kind, is_ours):
    (tmp_path / "train.py").write_text(
        f"from torchecho import errors\nraise {kind.__name__}('why')".replace(
            kind.__name__, kind.__name__ if kind is RuntimeError else f"errors.{kind.__name__}"
        )
    )
    outcome = run_program(Program(str(tmp_path / "train.py")), contextlib.nullcontext())
    assert outcome.exit_code == 1
    assert (type(outcome.error) is kind) == is_ours
    assert ("Traceback" in capsys.readouterr().err) != is_ours


def test_what_is_around_is_left_whatever_happens(tmp_path, as_before):
    left = []

    @contextlib.contextmanager
    def around():
        try:
            yield
        finally:
            left.append("left")

    for text in ("", "1 / 0", "raise SystemExit(3)"):
        (tmp_path / "train.py").write_text(text)
        run_program(Program(str(tmp_path / "train.py")), around())
    assert left == ["left"] * 3
