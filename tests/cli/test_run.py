"""``torchecho run`` on small programs: output and exit code stay theirs; summary and JSON tell of the plans."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchecho.cli.main import main
from torchecho.planner import journal

TRAINING = """
import argparse, os, sys
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--strict", action="store_true")
args = parser.parse_args()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh(), nn.GELU())])

    def forward(self, x):
        return self.layers(x)

if __name__ == "__main__":
    torch.manual_seed(0)
    model, criterion = Net(), nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss = criterion(model(torch.randn(256, 64)), torch.ones(256, 64))
        loss.backward()
        optimizer.step()
        print(loss.item().hex())
    print(sys.argv[1:], torch.rand(1).item(), file=sys.stderr)
    sys.exit(3)
"""


NOTICES = ("torchecho: planning", "torchecho: building")


@pytest.fixture(autouse=True)
def roomy(monkeypatch):
    """Let each run begin with no plans, and put back what its program takes over."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(journal, "_plans", [])


@pytest.fixture
def run(tmp_path, capfd):
    """Return what runs a program in this process and gives exit code, stdout, stderr and JSON."""

    def runs(text, *options, args=(), name="train.py"):
        path, json_path = tmp_path / name, tmp_path / "run.json"
        path.write_text(text)
        capfd.readouterr()
        code = main(["run", *options, "--json", str(json_path), str(path), *args])
        printed = capfd.readouterr()
        # Whether planning takes so long that it is announced depends on the machine.
        err = "".join(line for line in printed.err.splitlines(keepends=True) if not line.startswith(NOTICES))
        return code, printed.out, err, json.loads(json_path.read_text()) if json_path.exists() else None

    return runs


def plain(folder, text, *args):
    (folder / "plain.py").write_text(text)
    return subprocess.run(
        [sys.executable, str(folder / "plain.py"), *args], cwd=folder, capture_output=True, text=True, check=False
    )


def test_the_output_is_that_of_the_program_and_the_peak_is_lower(run, tmp_path):
    before = plain(tmp_path, TRAINING, "--strict", "--steps", "4")
    code, out, err, found = run(TRAINING, "--memory-budget", "0.7", args=["--strict", "--steps", "4"])
    assert code == before.returncode == found["exit_code"] == 3
    assert out == before.stdout
    assert err.startswith(before.stderr)
    assert found["steps"] == 4
    assert found["program"][1:] == ["--strict", "--steps", "4"]
    assert found["torch"] == torch.__version__
    [plan] = found["plans"]
    assert plan["name"] == "Net"
    assert plan["measured_peak_bytes"] <= plan["budget_bytes"] < plan["baseline_peak_bytes"]
    assert plan["num_recomputed"] > 0
    summary = err.removeprefix(before.stderr)
    assert "torchecho: 4 training steps" in summary
    assert "Net: peak" in summary
    assert "ops run again" in summary
    line = TRAINING.splitlines().index("        return self.layers(x)") + 1
    assert f"layers.1 train.py:{line}" in summary


def test_a_child_process_prints_the_same_bytes(tmp_path):
    # What torch reads when it is imported is for the program to set.
    text = TRAINING.replace("import torch\n", "os.environ['OMP_NUM_THREADS'] = '1'\nimport torch\n", 1)
    text = text.replace("    sys.exit(3)", "    print(torch.get_num_threads())\n    sys.exit(3)")
    before = plain(tmp_path, text)
    done = subprocess.run(
        [sys.executable, "-m", "torchecho", "run", "--memory-budget", "0.7", "plain.py"],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.stdout == before.stdout.encode()
    assert done.stdout.endswith(b"\n1\n")
    assert done.returncode == 3
    assert b"torchecho: 4 training steps" in done.stderr


def test_the_reference_measures_the_untouched_peak(run):
    found = run(TRAINING, "--max-slowdown", "0")[3]
    [plan] = found["plans"]
    assert plan["num_recomputed"] == 0
    assert plan["measured_peak_bytes"] == plan["predicted_peak_bytes"] == plan["baseline_peak_bytes"]


def test_larger_steps_of_the_reference_recompute_nothing_either(run, monkeypatch):
    made = []
    monkeypatch.setattr("torchecho.engine.passes.Tape", lambda *args: made.append(args))
    text = TRAINING.replace("torch.randn(256, 64)", "torch.randn(256 + 64 * _, 64)").replace(
        "torch.ones(256, 64)", "torch.ones(256 + 64 * _, 64)"
    )
    assert run(text, "--max-slowdown", "0")[0] == 3
    assert made == []


def test_state_of_the_optimizer_counts(run):
    peaks = {}
    for optimizer in ("Adam", "SGD"):
        text = TRAINING.replace(
            "torch.optim.Adam(model.parameters())", f"torch.optim.{optimizer}(model.parameters(), 1e-3)"
        )
        [plan] = run(text, "--max-slowdown", "0")[3]["plans"]
        peaks[optimizer] = plan["predicted_peak_bytes"]
        journal._plans.clear()
    parameters, numbers = 4 * 4 * (64 * 64 + 64), 8 * 4
    assert peaks["Adam"] - peaks["SGD"] == 2 * parameters + numbers


SEVERAL = """
import torch
from torch import nn
torch.manual_seed(0)
encoder, decoder, critic = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1)
optimizers = [torch.optim.Adam(m.parameters()) for m in (encoder, decoder, critic)]
for _ in range(3):
    decoder(encoder(torch.randn(8, 16)).relu()).sum().backward()
    for optimizer in optimizers[:2]:
        optimizer.step()
        optimizer.zero_grad()
    critic(torch.randn(8, 16)).sum().backward()
    optimizers[2].step()
    optimizers[2].zero_grad()
"""


def test_every_optimizer_of_a_step_counts(run):
    found = run(SEVERAL, "--max-slowdown", "0")[3]
    first, second = found["plans"]
    assert (first["name"], second["name"]) == ("Linear", "Linear 2")
    assert found["steps"] == 9
    square, column = 4 * (16 * 16 + 16), 4 * (16 + 1)
    # Of encoder and decoder: parameters, gradients, both averages of Adam and its counts of steps.
    assert first["baseline_peak_bytes"] > 2 * 4 * square + 4 * 4
    assert second["baseline_peak_bytes"] > 4 * column
    assert second["baseline_peak_bytes"] < 4 * square


BY_HAND = """
import torch
from torch import nn
model = nn.Linear(4, 4)
for _ in range(5):
    model(torch.randn(2, 4)).sum().backward()
    for p in model.parameters():
        p.data -= 0.1 * p.grad
        p.grad = None
"""


def test_a_program_without_an_optimizer_counts_backwards(run):
    assert run(BY_HAND)[3]["steps"] == 5


def test_a_program_that_trains_nothing(run):
    code, out, err, found = run("print('hello')")
    assert (code, out) == (0, "hello\n")
    assert err == "torchecho: 0 training steps; nothing was planned: no backward followed the forward of a module\n"
    assert (found["steps"], found["plans"]) == (0, [])


def test_evaluation_is_left_alone(run):
    text = "import torch\nmodel = torch.nn.Linear(2, 2)\nwith torch.no_grad(): model(torch.ones(1, 2))\n"
    assert run(text + "model(torch.ones(1, 2))\n")[3]["plans"] == []


def test_a_module_by_name(tmp_path, monkeypatch, capfd):
    (tmp_path / "trainer_of_test_run.py").write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "-m", "trainer_of_test_run", "--json", "x"]) == 0
    assert capfd.readouterr().out == "__main__ ['--json', 'x']\n"


def test_an_uncaught_exception_shows_the_program_and_torch_only(run, tmp_path):
    text = "import torch\nmodel = torch.nn.Linear(2, 2)\nmodel(torch.ones(1, 3)).sum().backward()\n"
    before = plain(tmp_path, text)
    code, _, err, found = run(text, name="plain.py")
    assert code == before.returncode == found["exit_code"] == 1
    assert err.splitlines()[:4] == before.stderr.splitlines()[:4]
    assert err.splitlines()[-1] == before.stderr.splitlines()[-1]
    assert "torchecho" not in err.replace(str(tmp_path), "").replace(str(Path(torch.__file__).parent), "")


def test_a_budget_that_cannot_be_met_is_one_line(run):
    code, _, err, found = run(TRAINING, "--memory-budget", "0.01")
    assert code == found["exit_code"] == 1
    assert err.count("\n") == 1
    assert err.startswith("torchecho: error: budget ")
    assert "floor" in err


CATCHING = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh())
for _ in range(3):
    try:
        model(torch.randn(8, 16)).sum().backward()
    except Exception as error:
        print(type(error).__name__)
"""


@pytest.mark.parametrize("engine", ["eager", "compile"])
@pytest.mark.parametrize("ends", ["", "raise SystemExit(5)"])
def test_a_budget_that_cannot_be_met_ends_a_program_that_caught_the_error_all_the_same(run, engine, ends):
    code, out, err, found = run(CATCHING + ends, "--memory-budget", "1KiB", "--engine", engine)
    assert out == "BudgetError\n" * 3
    assert code == found["exit_code"] == 1
    assert err.count("\n") == 1
    assert err.startswith("torchecho: error: budget 1.0 KiB is below the floor")
    assert found["plans"] == []
    assert err == f"torchecho: error: {found['error']}\n"


def test_an_interrupt_after_a_caught_error_is_an_interrupt(run):
    code, _, err, _ = run(CATCHING + "raise KeyboardInterrupt", "--memory-budget", "1KiB")
    assert code == 130
    assert "torchecho: error" not in err


def test_strict_stops_where_a_step_would_run_untouched(run, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no costs")

    monkeypatch.setattr("torchecho.engine.draft.price", fails)
    code, _, err, found = run(TRAINING, "--strict")
    assert code == found["exit_code"] == 3
    assert err == "torchecho: error: planning Net failed: no costs\n"
    with pytest.warns(UserWarning, match="Net runs untouched"):
        code, out, _, found = run(TRAINING)
    assert (code, found["plans"], len(out.splitlines())) == (3, [], 4)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["absent.py"], "no file 'absent.py'"),
        (["-m", "no_such_module_at_all"], "no module named 'no_such_module_at_all'"),
        (["-m", "xml"], "no module named 'xml.__main__': 'xml' is a package and cannot be run itself"),
        ([], "no program"),
        (["--memory-budget", "much", "absent.py"], "memory_budget"),
        (["--engine", "egaer", "absent.py"], "'eager'"),
        (["--max-slowdown", "-1", "absent.py"], "max_slowdown"),
        (["--jsno", "x", "absent.py"], "--jsno"),
        (["--json", "-", "absent.py"], "standard output belongs to the program"),
        (["--json", "absent/run.json", "absent.py"], "folder does not exist"),
        (["--json", "/", "absent.py"], "it is a folder"),
    ],
)
def test_wrong_usage_is_one_line(words, hint, capfd):
    assert main(["run", *words]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("torchecho: error: ")
    assert captured.err.count("\n") == 1
    assert hint in captured.err


def test_an_interrupt_in_the_first_step_is_not_blamed_on_the_program(run, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torchecho.engine.draft.price", interrupted)
    code, _, err, found = run(BY_HAND)
    assert (code, found["exit_code"], found["error"], found["plans"]) == (130, 130, None, [])
    assert "no backward followed" not in err
    assert err.endswith("torchecho: interrupted\n")


HALF_IMPORTED = """
import sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.nn":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
"""


@pytest.mark.parametrize(
    ("imports", "code", "line"),
    [
        ("import torch", 130, "torchecho: interrupted"),
        ("try:\n    import torch\nexcept KeyboardInterrupt:\n    sys.exit('no torch')", 1, "no torch"),
    ],
)
def test_an_interrupt_while_torch_is_imported_is_no_failure_of_ours(tmp_path, imports, code, line):
    (tmp_path / "train.py").write_text(HALF_IMPORTED + imports)
    done = subprocess.run(
        [sys.executable, "-m", "torchecho", "run", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert done.stderr.splitlines()[-1] == line
    assert "internal failure" not in done.stderr


def test_help_has_an_example(capfd):
    assert main(["run", "--help"]) == 0
    assert "Example: torchecho run --memory-budget 0.5 train.py" in capfd.readouterr().out


def test_nothing_is_left_behind(run):
    call, backward, init = torch.nn.Module.__call__, torch.autograd.backward, torch.optim.Optimizer.__init__
    run(TRAINING + "\n", "--memory-budget", "0.7")
    run("import torch\nloss = torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum()\nraise SystemExit")
    assert torch.nn.Module.__call__ is call
    assert torch.autograd.backward is backward
    assert torch.optim.Optimizer.__init__ is init
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_a_compiled_program_runs_under_the_compile_engine(run):
    text = TRAINING.replace("criterion = Net(), nn", "criterion = torch.compile(Net(), backend='aot_eager'), nn")
    code, out, _, found = run(text, "--max-slowdown", "0.3")
    assert code == 3
    assert len(out.splitlines()) == 4
    [plan] = found["plans"]
    assert (plan["name"], plan["lowering"]) == ("Net", "inductor")
    assert plan["num_recomputed"] > 0


def test_the_compile_engine_can_be_asked_for(run):
    found = run(TRAINING.replace("range(4)", "range(1)"), "--engine", "compile", "--max-slowdown", "0.3")[3]
    [plan] = found["plans"]
    assert (plan["name"], plan["lowering"]) == ("Net", "inductor")


def test_modules_that_the_program_drops_are_freed(run):
    text = (
        "import gc, torch, weakref\nmodels = weakref.WeakSet()\n"
        "for _ in range(3):\n    model = torch.nn.Linear(4, 4)\n    models.add(model)\n"
        "    model(torch.ones(2, 4)).sum().backward()\n    model(torch.ones(2, 4)).sum().backward()\n"
        "del model\ngc.collect()\nprint(len(models))\n"
    )
    _, out, _, found = run(text)
    assert out == "0\n"
    assert len(found["plans"]) >= 3


def test_what_the_program_still_holds_of_the_step_before_is_measured_too(run):
    text = TRAINING.replace(
        "loss = criterion(model(torch.randn(256, 64)),", "y = model(torch.randn(256, 64)); loss = criterion(y,"
    )
    [plan] = run(text, "--max-slowdown", "0")[3]["plans"]
    assert plan["measured_peak_bytes"] == plan["predicted_peak_bytes"]


def test_a_warning_shows_the_programs_line_and_advises_what_a_run_offers(run, tmp_path):
    text = TRAINING.replace("range(4)", "range(6)")
    floor_bytes = run(text, "--memory-budget", "0.9")[3]["plans"][0]["floor_bytes"]
    journal._plans.clear()
    with pytest.warns(UserWarning, match=r"in place of torchecho run let the program plan this step") as told:
        run(text, "--memory-budget", str(floor_bytes))
    assert told[0].filename == str(tmp_path / "train.py")
    assert told[0].lineno == text.splitlines().index("        loss.backward()") + 1
