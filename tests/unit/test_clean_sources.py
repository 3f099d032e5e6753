"""`./duet clean` and the weights that other runs start from (--init_from)."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from tests.unit.monitor_runs import Made
from tests.unit.runs_to_clean import save
from tests.unit.test_runs_table import ended
from training.cli.cleaning import options, selection
from training.core import manifest, owner, sweep_dir
from training.core.contracts.run_files import SweepRun
from training.core.messages import msg
from training.core.sweep_dir import SweepDir


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The weights of a finished run."""
    run = ended(Made(tmp_path / "done", age_s=5000)).run
    file = run.checkpoints / manifest.folder_name(20) / manifest.STATE
    file.parent.mkdir()
    file.write_bytes(b"weights")
    return file


def users(folder: Path) -> list[tuple[str, str]]:
    """Why the finished run stays."""
    asked = options.parse([f"--dir={folder}", "--what=runs", "done"])
    return selection.select(asked).left


def test_a_run_of_someone_else_needs_them_while_it_may_be_running(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_other = {tmp_path / "over", tmp_path / "tune"}
    monkeypatch.setattr(owner, "other", lambda path: "bob" if path in of_other else None)
    begun = {"file": str(source)}
    ended(Made(tmp_path / "over", age_s=5000, init_from=begun))
    assert users(tmp_path) == []
    Made(tmp_path / "tune", init_from=begun).supervisor(os.getpid())
    assert users(tmp_path) == [("done", msg("cli.clean.starts_from", name="tune"))]


def begun(folder: Path, source: Path, created: float = 1.0) -> SweepDir:
    """A sweep of two runs that start from these weights."""
    runs: list[SweepRun] = [
        {"name": name, "args": [], "values": {}, "init_from": str(source)}
        for name in ("s_1", "s_2")
    ]
    sweep = SweepDir(folder, "s")
    sweep.create(
        {
            "schema_version": sweep_dir.VERSION,
            "duet_version": "",
            "created": created,
            "command": [],
            "cwd": "/",
            "ranks": 1,
            "device": "cpu",
            "runs": runs,
        }
    )
    return sweep


def test_runs_of_a_sweep_need_them_until_they_have_a_checkpoint(
    source: Path, tmp_path: Path
) -> None:
    sweep = begun(tmp_path, source, created=time.time())
    command = sweep_dir.command("resume", "s", tmp_path)
    needed = msg("cli.clean.sweep_starts_from", name="s", command=command, folder=sweep.path)
    assert users(tmp_path) == [("done", needed)], "no run has begun yet"
    ended(Made(tmp_path / "s_1"))
    second = Made(tmp_path / "s_2", age_s=5000)  # it died before its first checkpoint
    assert users(tmp_path) == [("done", needed)]
    save(second.run, 10)
    assert users(tmp_path) == []


def test_a_sweep_whose_first_run_was_refused_needs_them_for_a_day(
    source: Path, tmp_path: Path
) -> None:
    begun(tmp_path, source, created=time.time() - 600)
    assert len(users(tmp_path)) == 1


def test_a_sweep_without_runs_needs_nothing(source: Path, tmp_path: Path) -> None:
    begun(tmp_path, source)
    runs = [ended(Made(tmp_path / name, age_s=5000)).run for name in ("s_1", "s_2")]
    assert users(tmp_path) == []
    shutil.rmtree(runs[0].path)
    assert len(users(tmp_path)) == 1, "--resume would train it again"
    shutil.rmtree(runs[1].path)
    assert users(tmp_path) == []
