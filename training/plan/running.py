"""Whether a run is running on this machine, and the commands that show or end it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, cast

from training.core import owner, rundir, standing
from training.core.messages import msg
from training.core.next_command import submission_of

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan


def pid_of(run: rundir.RunDir) -> int | None:
    """PID of the process on this machine that runs the run, or begins to; not of this launch."""
    own = os.getpid(), os.getppid()
    started = standing.starter(run)
    if started not in (None, *own):
        return started
    facts = rundir.read_json(run.supervisor) or {}
    pid = facts.get("pid")
    # a killed supervisor may have had the PID of this launch, as 1 in a container
    if pid in (None, *own) or not standing.is_here(facts):
        return None
    if "ticks" in facts and not standing.runs_here(facts, 0.0):
        return None
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    # else the pid belongs to another process now
    return int(pid) if any(_is_folder(word, run.path) for word in words) else None


def _is_folder(word: bytes, folder: Path) -> bool:
    """Whether an argument, an absolute path, names this folder in any spelling."""
    try:
        return word.startswith(b"/") and folder.samefile(os.fsdecode(word))
    except (OSError, ValueError):
        return False


def monitor(run: rundir.RunDir) -> str:
    return f"./monitor_training.sh --run={shlex.quote(str(run.path))}"


def fixes(run: rundir.RunDir, pid: int) -> list[str]:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return [monitor(run), msg("plan.run.ask", user=owner.name(Path(f"/proc/{pid}")))]
    except OSError:  # it has ended meanwhile
        pass
    job = submission_of(cast("Plan", rundir.read_json(run.plan) or {}), run)
    return [monitor(run), f"scancel {job['job']}" if job and job["job"] else f"kill {pid}"]
