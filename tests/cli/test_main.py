import json
import subprocess
import sys
from importlib.metadata import version

import pytest
import typer

from torchecho.cli import info as info_module
from torchecho.cli.console import check_file, run_guarded, write_json
from torchecho.cli.main import main
from torchecho.errors import ApplyError, BudgetError, CaptureError, OptionError


def raiser(error):
    def command(*_):
        raise error

    return command


@pytest.fixture
def quick_facts(monkeypatch):
    facts = {"torchecho": "9", "device": "abacus [x]", "compiler": None, "cache_bytes": 2048}
    monkeypatch.setattr(info_module, "collect_facts", lambda: facts)
    return facts


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (BudgetError("floor is 3 MiB"), 1, "torchecho: error: floor is 3 MiB\n"),
        (OptionError("strict must be True"), 2, "torchecho: error: strict must be True\n"),
        (
            typer.BadParameter("no such\nfile"),
            2,
            "torchecho: error: Invalid value: no such file (see torchecho --help)\n",
        ),
        (CaptureError("graph break"), 3, "torchecho: error: graph break\n"),
        (ApplyError("no such op"), 3, "torchecho: error: no such op\n"),
        (KeyboardInterrupt(), 130, "torchecho: interrupted\n"),
        (typer.Abort(), 130, "torchecho: interrupted\n"),
    ],
)
def test_exit_codes(error, code, line, capsys):
    assert run_guarded(raiser(error)) == code
    captured = capsys.readouterr()
    assert captured.err == line
    assert captured.out == ""


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("by zero\nsecond line"), RuntimeError("by zero"), MemoryError("by zero")]
)
def test_what_nobody_expected_is_one_line(error, capsys):
    assert run_guarded(raiser(error)) == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert f"internal failure: {type(error).__name__}: by zero" in lines[0]


def test_debug_shows_the_traceback(capsys, monkeypatch):
    monkeypatch.setenv("TORCHECHO_DEBUG", "1")
    assert run_guarded(raiser(ZeroDivisionError("by zero"))) == 3
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (1, 1), ("text", 0)])
def test_a_command_may_return_its_exit_code(returned, code):
    assert run_guarded(lambda: returned) == code


def test_help_has_an_example_and_the_exit_codes(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "Example: torchecho info" in out
    assert "Exit codes: 0 done" in out
    assert "130 interrupted" in " ".join(out.split())
    assert "--version" in out


def test_no_command_shows_the_help_and_is_wrong_usage(capsys):
    assert main([]) == 2
    captured = capsys.readouterr()
    assert "Usage: torchecho" in captured.out + captured.err
    assert "error" not in captured.err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"torchecho {version('torchecho')}\n"


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["inf"], "Did you mean 'info'?"),
        (["info", "--jsn", "x"], "--jsn"),
        (["info", "extra"], "extra"),
        (["info", "--json"], "--json"),
    ],
)
def test_wrong_usage_is_one_line(args, hint, capsys):
    assert main(args) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("torchecho: error: ")
    assert hint in lines[0]
    assert lines[0].endswith(f" (see torchecho{' info' if args[0] == 'info' else ''} --help)")


def test_help_does_not_import_torch():
    program = (
        "import sys; from torchecho.cli.main import main; main(['info', '--help']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout


def test_info_prints_a_line_a_fact(quick_facts, capsys):
    assert main(["info"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "torchecho     9",
        "device        abacus [x]",
        "compiler      none",
        "cache         2.0 KiB",
    ]


def test_ctrl_c_in_a_command(monkeypatch, capsys):
    monkeypatch.setattr(info_module, "collect_facts", raiser(KeyboardInterrupt()))
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "torchecho: interrupted\n"


def test_info_json_alone_goes_to_stdout(quick_facts, capsys):
    assert main(["info", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == quick_facts


def test_info_json_to_a_file_keeps_the_table(quick_facts, capsys, tmp_path):
    assert main(["info", "--json", str(tmp_path / "info.json")]) == 0
    assert json.loads((tmp_path / "info.json").read_text()) == quick_facts
    assert "abacus" in capsys.readouterr().out


def test_json_that_cannot_be_written_is_wrong_usage(quick_facts, capsys, tmp_path):
    path = str(tmp_path / "absent" / "info.json")
    assert main(["info", "--json", path]) == 2
    assert capsys.readouterr().err == f"torchecho: error: --json: cannot write {path!r}: its folder does not exist\n"


def test_a_file_that_cannot_be_written_is_found_out_at_the_start(monkeypatch, tmp_path):
    (tmp_path / "there.json").touch()
    for path in (None, "-", str(tmp_path / "there.json"), str(tmp_path / "new.json")):
        check_file("--json", path)
    with pytest.raises(OptionError, match=r"^--json: cannot write '.*': it is a folder: name a file in it$"):
        check_file("--json", str(tmp_path))
    with pytest.raises(OptionError, match=r"--markdown: .* its folder does not exist"):
        check_file("--markdown", str(tmp_path / "absent" / "x.md"))
    asked = []
    monkeypatch.setattr("os.access", lambda path, mode: asked.append(path))
    for name in ("there.json", "new.json"):
        with pytest.raises(OptionError, match="it may not be written"):
            check_file("--json", str(tmp_path / name))
    assert asked == [tmp_path / "there.json", tmp_path]


def test_facts_are_printed_before_they_are_written(quick_facts, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(info_module, "write_json", raiser(OptionError("disk full")))
    assert main(["info", "--json", str(tmp_path / "x.json")]) == 2
    assert "abacus" in capsys.readouterr().out


def test_json_keeps_text_as_it_is(tmp_path):
    write_json(str(tmp_path / "x.json"), {"loss": 1.5, "text": "tiếng Việt"})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {"loss": 1.5, "text": "tiếng Việt"}


def test_facts_of_this_machine(monkeypatch, tmp_path):
    import torch

    monkeypatch.setenv("TORCHECHO_CACHE", str(tmp_path))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "table.json").write_bytes(b"x" * 100)
    facts = info_module.collect_facts()
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["cache_folder"] == str(tmp_path)
    assert facts["cache_bytes"] == 100
    assert facts["device"]
    assert facts["cores"] >= 1


def test_a_cache_that_is_not_there_yet_is_empty(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHECHO_CACHE", str(tmp_path / "later"))
    assert info_module.collect_facts()["cache_bytes"] == 0
    assert not (tmp_path / "later").exists()


@pytest.mark.parametrize(("cxx", "path"), [("my-cxx", ""), (None, "/nowhere")])
def test_no_compiler_is_none(cxx, path, monkeypatch):
    monkeypatch.setenv("PATH", path)
    if cxx is None:
        monkeypatch.delenv("CXX", raising=False)
    else:
        monkeypatch.setenv("CXX", cxx)
    assert info_module.describe_compiler() is None


def test_the_chosen_compiler_is_described(monkeypatch, tmp_path):
    compiler = tmp_path / "my-cxx"
    compiler.write_text("#!/bin/sh\necho my-cxx 1.2.3\necho more\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert info_module.describe_compiler() == f"{compiler} (my-cxx 1.2.3)"
