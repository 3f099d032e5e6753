"""The files of a run beside its checkpoints that a copy has: what a resume, the report and the
trackers need. Logs, stacks and profiles stay on their machines."""

from __future__ import annotations

import hashlib
from pathlib import Path

from training.core import rundir
from training.core.rundir import RunDir

PART = 1 << 23  # bytes of a file that are sent and verified together
MARK = 1 << 16  # bytes before a position that identify an append-only file
DEPTH = 4  # of a file below the run directory
LINES = ".jsonl"


def names(run: RunDir, *, last: bool) -> list[str]:
    """The files that exist, relative to the run directory. `last`: the run has ended, and its
    summary is final."""
    single = [run.metrics, run.events, run.wandb_id, *([run.summary] if last else [])]
    found = [path for path in single if path.is_file()]
    for folder in (run.samples, run.tensorboard):
        found += sorted(path for path in folder.rglob("*") if path.is_file())
    made = (path.relative_to(run.path).as_posix() for path in found)
    return [name for name in made if path_of(run, name)]


def path_of(run: RunDir, name: object) -> Path | None:
    """None for any other name: it comes from a network."""
    if not isinstance(name, str):
        return None
    parts = name.split("/")
    if len(parts) > DEPTH or not all(map(rundir.is_name, parts)):
        return None
    single = {run.metrics.name, run.events.name, run.wandb_id.name, run.summary.name}
    folders = {run.samples.name, run.tensorboard.name}
    known = name in single if len(parts) == 1 else parts[0] in folders
    return run.path / name if known else None


def mark(path: Path, at: int) -> str:
    """Identifies the content before the byte `at`. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, at - MARK))
        return mark_of(file.read(min(at, MARK)))


def mark_of(tail: bytes) -> str:
    return hashlib.sha256(tail[-MARK:]).hexdigest()


def part(path: Path, at: int) -> bytes:
    """The next bytes from `at`; of a .jsonl file whole lines only. Raises OSError."""
    with path.open("rb") as file:
        file.seek(at)
        found = file.read(PART)
    return found[: found.rfind(b"\n") + 1] if path.name.endswith(LINES) else found


def size(path: Path) -> int:
    """0 if it is missing."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
