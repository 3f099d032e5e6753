"""Code of a user's task in the commands that use its weights: its modules, options, errors, and
what its model saves."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import training
from tests.cases import each
from tests.unit.conftest import ROOT
from tests.unit.trained_runs import checkpoint
from training import tasks
from training.cli import evaluate, export
from training.core import rundir
from training.core.errors import Exit, Problem, UserError
from training.inspector.distributed import World
from training.tasks import custom, own_modules
from training.trainer import start_weights

ALONE = World(0, 0, 1, torch.device("cpu"), "none", "-")
TASK = """
import net
import torch
from torch.utils.data import TensorDataset

from training.tasks.base import Task

OPTIONS = {"width": 2}


class Mine(Task):
    def model(self):
        return net.Net(self.options.width)

    def train_data(self):
        return TensorDataset(torch.ones(4, self.options.width))

    def val_data(self):
        return self.train_data()

    def loss(self, model, batch):
        import late

        return model(batch[0]).mean() * net.SCALE * late.SCALE
"""
NET = """
from parts.layers import Ones
from torch import nn

SCALE = {scale}


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ones = Ones(width)

    def forward(self, x):
        return self.ones(x)
"""
LAYERS = """
import torch
from torch import nn


class Ones(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x @ self.weight
"""
SEEN = """
    def get_extra_state(self):
        return {"seen": getattr(self, "seen", 0), "mean": torch.ones(2)}

    def set_extra_state(self, state):
        self.seen = state["seen"]
"""


@pytest.fixture(autouse=True)
def imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores Python's import state."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    for name, module in list(sys.modules.items()):
        if str(module.__dict__.get("__file__")).startswith(str(tmp_path)):
            del sys.modules[name]


def written(folder: Path, scale: int = 1) -> Path:
    """The file of the task, with its modules. Its validation loss: scale² × width."""
    (folder / "parts").mkdir(parents=True)
    (folder / "net.py").write_text(NET.format(scale=scale))
    (folder / "late.py").write_text(f"SCALE = {scale}\n")
    (folder / "parts/__init__.py").touch()
    (folder / "parts/layers.py").write_text(LAYERS)
    (folder / "mine.py").write_text(TASK)
    return folder / "mine.py"


def run_of(file: Path, **options: Any) -> str:
    """A run of this task, with a checkpoint."""
    run = rundir.RunDir(file.parent / "run")
    run.create()
    kind = custom.CustomSpec("mine", {}, file)
    plan: Any = {"config": {}, "task": kind.record({"width": 2} | options)}
    rundir.write_json(run.plan, plan)
    checkpoint(run, tasks.make(plan, torch.device("cpu"), None).model().state_dict(), {}, 9)
    return str(run.path)


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def loss(source: str | Path) -> float:
    return tasks.load_model(source).evaluate()["loss"]


def problem(error: pytest.ExceptionInfo[UserError]) -> Problem:
    (one,) = error.value.problems
    return one


# ── modules


def test_modules_beside_a_task_are_exported(tmp_path: Path) -> None:
    file, out = written(tmp_path / "a", 3), tmp_path / "out"
    (tmp_path / "elsewhere.py").touch()
    packages = file.parent / "env/lib/site-packages"
    packages.mkdir(parents=True)
    (packages / "installed.py").touch()
    file.write_text(
        f"import sys\nsys.path += [{str(packages)!r}, __file__[:-7] + '..']\n"
        f"import elsewhere, installed, late\n{file.read_text()}"
    )
    run = run_of(file)
    assert export.main([run, f"--out={out}", "--quiet"]) == 0
    shutil.rmtree(file.parent)
    assert {str(p.relative_to(out)) for p in out.rglob("*.py")} == {
        "mine.py", "net.py", "late.py", "parts/__init__.py", "parts/layers.py"
    }  # fmt: skip
    assert "parts/layers.py" in (out / "README.md").read_text()
    assert (out / "parts").stat().st_mode & 0o777 == 0o755
    sys.path += [str(packages)]
    packages.mkdir(parents=True)
    (packages / "installed.py").touch()
    assert loss(out) == 18
    assert sys.modules["net"].__file__ == str(out / "net.py")
    again = tmp_path / "again"
    assert export.main([str(out), f"--out={again}", "--quiet"]) == 0
    assert (again / "parts/layers.py").read_text() == LAYERS


def test_each_model_uses_the_modules_beside_its_own_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [run_of(written(tmp_path / name, scale)) for name, scale in (("a", 1), ("b", 3))]
    assert evaluate.main([*runs, "--json", "--device=cpu"]) == 0
    rows = json.loads(capsys.readouterr().out)["evaluations"]
    assert [row["loss"] for row in rows] == [2, 18]
    first, second = (tasks.load_model(run) for run in runs)
    assert [first.evaluate()["loss"], second.evaluate()["loss"]] == [2, 18]
    assert [str(tmp_path / name) in sys.path for name in "ab"] == [False, True]


def test_an_evaluation_has_the_settings_with_which_the_model_was_made(tmp_path: Path) -> None:
    run = run_of(file := written(tmp_path / "a"))
    precision = 'torch.set_float32_matmul_precision("high")\n        return net.Net'
    replace(file, "return net.Net", precision)
    try:
        trained = tasks.load_model(run)
        assert trained._modes and trained._modes.products == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_what_is_installed_below_the_folder_of_a_task_is_not_of_the_task() -> None:
    packages = Path(os.__file__).parents[2]
    assert own_modules.inside(str(training.__path__[0]) + "/plan/x.py", ROOT) is None
    assert own_modules.inside(os.__file__, packages) is None
    assert own_modules.inside(ROOT / "a/../b/c.py", ROOT) == Path("b/c.py")
    assert own_modules.inside(ROOT / "../c.py", ROOT) is None


# ── options


def test_an_option_that_a_run_does_not_have_takes_its_default(tmp_path: Path) -> None:
    file = written(tmp_path / "a")
    run = run_of(file, width=3)
    replace(file, '{"width": 2}', '{"width": 2, "factor": 5}')
    replace(file, "* net.SCALE", "* self.options.factor")
    assert loss(run) == 15


# ── errors


@each(
    "name, old, new, line",
    [
        ("mine.py", "class Mine(Task):", "class Mine(Task:", 11),
        ("mine.py", "import net\n", "import not_there\n", 2),
        ("mine.py", "return net.Net(", "return net.Nett(", 13),
        ("net.py", "SCALE = ", "SCALE = 1 / 0 + ", 5),
        ("mine.py", "mean() *", "mean() * self.lost *", 24),
        ("parts/layers.py", "x @ self.weight", "x @ self.weight[1:]", 12),
    ],
)
def test_an_error_of_a_task_does_not_lose_the_other_models(
    name: str, old: str, new: str, line: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, right = written(tmp_path / "wrong"), written(tmp_path / "right")
    words = [run_of(wrong), run_of(right)]
    place = wrong.parent / name
    replace(place, old, new)
    capsys.readouterr()
    assert evaluate.main([*words, "--json", "--device=cpu"]) == Exit.CONFIG
    printed = capsys.readouterr()
    (row,) = json.loads(printed.out)["evaluations"]
    assert row["loss"] == 2 and f"{place}:{line}: " in printed.err
    text = place.read_text().splitlines()[line - 1].strip()
    assert f"{text}\n" in printed.err.replace("  ", "")  # as in the traceback
    with pytest.raises(UserError) as caught:
        tasks.load_model(words[0]).evaluate()
    assert problem(caught).code == "task.failed" and caught.value.__cause__ is not None


def test_an_export_names_the_line_of_an_error(tmp_path: Path) -> None:
    file = written(tmp_path / "a")
    run = run_of(file)
    replace(file, "net.Net(", "net.Nett(")
    with pytest.raises(UserError) as caught:
        export.main([run, f"--out={tmp_path / 'out'}"])
    assert problem(caught).what.startswith(f"{file}:13: ")


def test_a_result_that_is_refused_is_an_error_of_the_task(tmp_path: Path) -> None:
    file = written(tmp_path / "a")
    replace(file, "return model(batch", "return -model(batch")
    run = run_of(file)
    with file.open("a") as text:
        text.write("    def metrics(self, model, batch):\n        return 3\n")
    line = len(file.read_text().splitlines()) - 1
    with pytest.raises(UserError) as caught:
        loss(run)
    assert problem(caught).code == "task.failed"
    assert problem(caught).what.startswith(f"{file}:{line}: ") and "^" not in problem(caught).what


def test_a_task_without_val_data_is_not_called_empty(tmp_path: Path) -> None:
    file = written(tmp_path / "a")
    replace(file, "def val_data", "def other_data")
    with pytest.raises(UserError) as caught:
        loss(run_of(file))
    assert problem(caught).code == "task.no_val_data"


# ── what a model saves


def test_extra_state_belongs_to_the_weights(tmp_path: Path) -> None:
    file, out = written(tmp_path / "a"), tmp_path / "out"
    net = file.parent / "net.py"
    net.write_text(f"import torch\n{net.read_text()}{SEEN}        self.loaded = True\n")
    replace(net, "self.ones = Ones(width)", "self.ones, self.seen = Ones(width), 7")
    run = run_of(file)
    replace(net, ", 7", ", 0")
    sys.modules.pop("net")
    assert tasks.load_model(run).model.seen == 7
    assert export.main([run, f"--out={out}", "--format=torch", "--quiet"]) == 0
    assert tasks.load_model(out).model.seen == 7
    fresh: Any = tasks.load_model(out).task.model()  # type: ignore[union-attr]
    start: Any = {"file": str(out / "model.pt"), "bytes": None, "sha256": None, "title": "out"}
    plan: Any = {"init_from": start}
    start_weights.init_from(fresh, plan, rundir.RunDir("new"), ALONE)
    assert fresh.seen == 7
    with pytest.raises(UserError) as caught:
        export.main([run, f"--out={tmp_path / 'no'}"])
    assert problem(caught).code == "weights.format" and "_extra_state" in problem(caught).what
    assert problem(caught).fixes == ["--format=torch"] and not (tmp_path / "no").exists()


@each("wrong", ['state["lost"]', "torch.ones(2).view(3)", "self.fail()"])
def test_an_error_in_set_extra_state_is_one_of_the_task(wrong: str, tmp_path: Path) -> None:
    """Also a RuntimeError, which torch raises for weights of another model."""
    file = written(tmp_path / "a")
    net = file.parent / "net.py"
    net.write_text(f"import torch\n{net.read_text()}{SEEN}")
    run = run_of(file)
    state = tasks.load_model(run).model.state_dict()
    replace(net, 'state["seen"]', wrong)
    net.write_text(f"{net.read_text()}\n    def fail(self):\n        raise RuntimeError('lost')\n")
    sys.modules.pop("net")
    with pytest.raises(UserError) as caught:
        tasks.load_model(run)
    assert problem(caught).code == "task.failed" and f"{net}:" in problem(caught).what
    model = sys.modules["net"].Net(2)
    loaded: Any = SimpleNamespace(state={"model": state}, path=tmp_path)
    with pytest.raises((KeyError, RuntimeError), match=r"lost|shape"):  # as in the rank's report
        start_weights.load(model, None, loaded, {})  # type: ignore[arg-type]


def test_a_resume_with_another_model_is_refused_as_such(tmp_path: Path) -> None:
    class Own(torch.nn.Linear):
        def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
            return super().load_state_dict(state, strict, assign)

    loaded: Any = SimpleNamespace(state={"model": Own(2, 2).state_dict()}, path=tmp_path)
    with pytest.raises(UserError) as caught:
        start_weights.load(Own(3, 2), None, loaded, {})  # type: ignore[arg-type]
    assert problem(caught).code == "resume.other_model"


@each("buffer", ["torch.eye(3).to_sparse()", "torch.ones(2, dtype=torch.complex128)"])
def test_tensors_that_safetensors_cannot_hold(buffer: str, tmp_path: Path) -> None:
    file, out = written(tmp_path / "a"), tmp_path / "out"
    net = file.parent / "net.py"
    net.write_text(f"import torch\n{net.read_text()}")
    replace(net, "self.ones =", f"self.register_buffer('odd', {buffer})\n        self.ones =")
    run = run_of(file)
    with pytest.raises(UserError) as caught:
        export.main([run, f"--out={out}"])
    assert problem(caught).code == "weights.format" and problem(caught).fixes == ["--format=torch"]
    assert "odd" in problem(caught).what and not out.exists()
    assert export.main([run, f"--out={out}", "--format=torch", "--quiet"]) == 0
    wanted, found = (tasks.load_model(one).model.state_dict() for one in (run, out))
    assert torch.equal(wanted["odd"].to_dense(), found["odd"].to_dense())
