"""A user's task file outside of its own training: edited since a checkpoint, with a val_data() that
needs more, and its precision."""

from __future__ import annotations

import re
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.cases import each
from tests.conftest import ROOT
from tests.unit.own_task import LINE
from training import tasks
from training.config.schema import Config
from training.core import rundir
from training.core.errors import UserError
from training.core.phases import EVALUATION
from training.core.rundir import RunDir
from training.inspector.distributed import World
from training.tasks import custom, export, half, own_modules
from training.tasks.base import Task
from training.tasks.optim import Optimizers
from training.trainer import checkpoint, start_weights
from training.trainer.checkpoint import TrainProgress

if TYPE_CHECKING:
    from training.core.contracts.run_files import ManifestRecord

CPU = torch.device("cpu")
WORLD = World(0, 0, 1, CPU, "none", "-")
CHANGED = "has changed since"


def saved_by(task: Task, run: RunDir, step: int = 3, **other: Any) -> tuple[Path, ManifestRecord]:
    """A checkpoint of the task, and its facts."""
    model = task.model()
    optimizer = task.optimizers(model)
    for part in optimizer.parts:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        part.step()
    facts: ManifestRecord = {
        "shape": {}, "data": {}, "tokenizer": None, "task": "my line", "world_size": 1,
        "optimizer": type(optimizer.parts[0]).__name__, "task_sha256": task.file_sha256,
    }  # fmt: skip
    facts |= cast("ManifestRecord", other)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return checkpoint.save(run.checkpoints, TrainProgress(step), state, facts), facts


def test_an_edited_file_is_reported_by_a_resume(
    home: Path, line: str, imports: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run, options = RunDir(home / "run"), {"width": 4, "bias": True}
    run.create()
    made = custom.load(home / line, options, Config(), CPU)
    _, facts = saved_by(made, run)
    plan: Any = {"task": {"file": str(home / line)}}

    def resumed(facts: ManifestRecord, chosen: torch.optim.Optimizer) -> list[str]:
        loaded, optimizer = checkpoint.latest(run.checkpoints), Optimizers([chosen])
        assert loaded
        continued = start_weights.load(model, optimizer, loaded, facts)
        start_weights.report_resume(loaded, run, WORLD, facts, plan, optimizer_continued=continued)
        texts = [r["text"] for r in rundir.read_records(run.events) if r["event"] == "warning"]
        assert all(text in capsys.readouterr().err for text in texts[-1:])
        run.events.unlink()
        return texts

    model = made.model()
    adam = torch.optim.AdamW(model.parameters())
    assert resumed(facts, adam) == [] and len(adam.state) == 2
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    changed: ManifestRecord = {**facts, "task_sha256": "other", "optimizer": "SGD"}
    file, optimizer = resumed(changed, sgd)
    assert CHANGED in file and line in file and "step_00000003" in file
    assert "AdamW" in optimizer and "SGD" in optimizer and not sgd.state
    groups = torch.optim.AdamW([{"params": [weight]} for weight in model.parameters()])
    (optimizer,) = resumed(facts, groups)
    assert "AdamW" in optimizer and "step_00000003" in optimizer and not groups.state
    built_in: Any = {k: v for k, v in facts.items() if k != "task_sha256"}
    with pytest.raises(UserError) as caught:
        resumed(built_in, groups)
    assert [problem.code for problem in caught.value.problems] == ["resume.other_optimizer"]
    adam = torch.optim.AdamW(model.parameters())
    early = {k: v for k, v in facts.items() if k != "task_sha256"}
    shutil.rmtree(run.checkpoints / "step_00000003")
    checkpoint.save(run.checkpoints, TrainProgress(4), {"model": {}}, cast("ManifestRecord", early))
    loaded = checkpoint.latest(run.checkpoints)
    assert loaded
    start_weights.report_resume(loaded, run, WORLD, facts, plan, optimizer_continued=True)
    assert CHANGED not in capsys.readouterr().err, "of an earlier version"


class AdamW(torch.optim.Adadelta):
    """Has the name of torch's and another state."""


def test_a_torch_that_is_not_installed_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[torch.optim.AdamW.__module__]
    monkeypatch.setattr(module, "__file__", "/home/u/pytorch/torch/optim/adamw.py")
    assert own_modules.package_of(torch.optim.AdamW) == "torch"


def test_an_optimizer_of_the_same_name_from_another_package_begins_without_state(
    home: Path, line: str, imports: None
) -> None:
    run = RunDir(home / "run")
    run.create()
    made = custom.load(home / line, {"width": 4, "bias": True}, Config(), CPU)
    model = made.model()
    torchs, own = (
        start_weights.kind_of(Optimizers([kind(model.parameters())]))
        for kind in (torch.optim.AdamW, AdamW)
    )
    assert torchs == {"optimizer": "AdamW", "optimizer_package": "torch"}
    assert own == {"optimizer": "AdamW", "optimizer_package": ""}
    other = {"optimizer_package": "bitsandbytes"}
    cases: Any = [(torchs, torchs, True), (torchs, own, False), (torchs, other, False)]
    cases.append((other, {"optimizer_package": ""}, True))  # a clone of it, perhaps
    early: Any = ({}, torchs, True)
    for saved, here, continued in (*cases, early):
        _, facts = saved_by(made, run, **saved)
        loaded = checkpoint.latest(run.checkpoints)
        assert loaded
        adam = Optimizers([torch.optim.AdamW(model.parameters())])
        now: Any = {**facts, **here}
        assert start_weights.load(model, adam, loaded, now) == continued, (saved, here)
        if not continued:
            kinds = [start_weights._kind(one) for one in (loaded.manifest, now)]
            text = start_weights._without_state(loaded, now)
            assert kinds[0] != kinds[1] and all(kind in text for kind in kinds)


SPLIT = """
    def val_data(self):
        return self.left_by_train_data
"""


def test_val_data_that_needs_train_data_is_named(home: Path, line: str, imports: None) -> None:
    run, options = RunDir(home / "run"), {"width": 4, "bias": True}
    run.create()
    with (home / line).open("a") as file:
        file.write(SPLIT)
    saved_by(custom.load(home / line, options, Config(), CPU), run)
    kind = custom.CustomSpec("my line", {}, home / line)
    rundir.write_json(run.plan, {"config": {}, "task": kind.record(options)})
    trained = tasks.load_model(run.path)
    with pytest.raises(UserError) as caught:
        trained.evaluate()
    (problem,) = caught.value.problems
    place = len((home / line).read_text().splitlines())
    assert problem.code == "task.val_data" and "left_by_train_data" in problem.what
    assert problem.what.startswith(f"{home / line}:{place}: ")


def test_an_edited_file_is_reported_by_commands_that_use_the_weights(
    home: Path, line: str, imports: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run, options = RunDir(home / "run"), {"width": 4, "bias": True}
    run.create()
    kind = custom.CustomSpec("my line", {}, home / line)
    made = custom.load(home / line, options, Config(), CPU)
    folder, _ = saved_by(made, run)
    rundir.write_json(run.plan, {"config": {}, "task": kind.record(options)})
    tasks.load_model(run.path)
    assert CHANGED not in capsys.readouterr().err
    with (home / line).open("a") as file:
        file.write("# edited\n")
    tasks.load_model(run.path)
    text = capsys.readouterr().err
    assert CHANGED in text and line in text and str(folder) in text


@each(
    "begin, end, codes",
    [
        (b"\xef\xbb\xbf", b"", []),
        (b"# coding: latin-1\n", b"E = '\xe9'\n", []),
        (b"", b"E = '\xe9'\n", ["task.syntax"]),
        (b"# coding: unheard-of\n", b"", ["task.syntax"]),
    ],
)
def test_a_file_is_decoded_as_python_does(
    begin: bytes, end: bytes, codes: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "marked.py"
    file.write_bytes(begin + (LINE + "    eval_batch = 2\n").encode() + end)
    options, problems = custom.read(file, "--task", [])
    assert [problem.code for problem in problems] == codes
    assert ("width" in options) == (not codes)
    lighter = custom.CustomSpec("marked", {}, file).lighter_in(EVALUATION)
    assert (lighter is None) == bool(codes), "eval_batch is found"


SIZE = """
    def val_data(self):
        return self.train_data()

    def metrics(self, model, batch):
        found = model(batch[0])
        return {"size": torch.full((len(found),), float(found.element_size()))}
"""


@each(
    "precision, instructions, size",
    [("bf16", True, 2), ("bf16", False, 4), ("fp16", True, 4), ("fp32", True, 4), (None, True, 4)],
)
def test_an_evaluation_computes_in_the_precision_of_the_run(
    precision: str | None,
    instructions: bool,
    size: float,
    home: Path,
    tmp_path: Path,
    line: str,
    imports: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where this device does not only emulate it; also of an exported model, and of one from before
    exports had it."""
    monkeypatch.setattr(half.decisions, "cpu_bf16", lambda: {"amx_bf16"} if instructions else set())
    run, options = RunDir(tmp_path / "run"), {"width": 4, "bias": True}
    run.create()
    file = tmp_path / "my line.py"
    file.write_text((home / line).read_text() + SIZE)
    shutil.copy(home / "beside.py", tmp_path)
    saved_by(custom.load(file, options, Config(), CPU), run)
    plan: Any = {"config": {}, "task": custom.CustomSpec("my line", {}, file).record(options)}
    if precision:
        plan["precision"] = {"value": precision, "reason": ""}
    rundir.write_json(run.plan, plan)
    trained = tasks.load_model(run.path)
    export.write(trained, "safetensors", tmp_path / "out")
    for one in (trained, tasks.load_model(tmp_path / "out")):
        assert one.evaluate()["size"] == size


def test_the_documented_lock_lets_one_rank_prepare_the_data(tmp_path: Path) -> None:
    page = (ROOT / "docs/tasks.md").read_text().partition("## Work once per machine")[2]
    block = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert block
    names: dict[str, Any] = {"torch": torch, "Task": object, "TensorDataset": TensorDataset}
    exec(block[1], names)
    prepared, waits = list[int](), threading.Event()

    class Ranks(names["MyTask"]):  # type: ignore[misc]
        options = SimpleNamespace(cache=str(tmp_path / "features.pt"))

        def alive(self) -> None:
            waits.set()

        def features(self) -> list[torch.Tensor]:
            prepared.append(1)
            assert waits.wait(10), "the other rank"
            return [torch.arange(3)]

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda _: Ranks().train_data().tensors[0].tolist(), range(2)))
    assert found == 2 * [[0, 1, 2]] and prepared == [1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["features.lock", "features.pt"]
