"""Runs with checkpoints for the tests of `./duet clean`."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from tests.unit.monitor_runs import Made
from tests.unit.test_runs_table import ended
from training.cli import clean
from training.core import manifest
from training.core.rundir import RunDir


def save(run: RunDir, step: int) -> Path:
    """A small checkpoint with its checksums."""
    folder = run.checkpoints / manifest.folder_name(step)
    folder.mkdir(parents=True)
    content = f"weights of step {step}".encode()
    (folder / "state.pt").write_bytes(content)
    facts = dict.fromkeys(manifest.KEYS[2:-3], None)
    own = {"step": step, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.write(folder, {**facts, **own})  # type: ignore[typeddict-item]
    return folder


def a_finished_and_a_live_run(place: Path) -> Path:
    """Three checkpoints in a finished run (the best evaluation is of the first one) and in a
    running one."""
    done = ended(Made(place / "done", age_s=5000))
    live = Made(place / "live").steps(5).supervisor(os.getpid())
    for step, bpb in ((10, 1.0), (20, 2.0), (30, 1.5)):
        for run in (done.run, live.run):
            save(run, step)
            run.event("eval", step=step, val_bpb=bpb)
    return place


def steps(folder: Path, name: str = "done") -> list[int]:
    found = manifest.all_in(RunDir(folder / name).checkpoints)
    return [int(path.name.removeprefix("step_")) for path in found]


def cleaned(folder: Path, *argv: str) -> int:
    return clean.main([f"--dir={folder}", *argv])


def everything(folder: Path) -> list[tuple[str, int]]:
    """Names and modes."""
    return sorted((str(path), path.lstat().st_mode) for path in folder.rglob("*"))
