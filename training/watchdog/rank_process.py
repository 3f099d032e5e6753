"""Whether a process is the one that writes a heartbeat, rather than one that reuses its PID."""

from __future__ import annotations

import time
from pathlib import Path

from training.core import owner, rundir, standing
from training.core.heartbeat import HeartbeatRecord
from training.core.jsonl import dig
from training.host import proc_memory
from training.watchdog.probes import procfs


def writes(beat: HeartbeatRecord, run: rundir.RunDir) -> bool:
    """Is it that of `beat`? The mappings of another user's process cannot be read: there it is the
    one if it is a Python that this user has started before the beat, as far as that is shown, and
    the beat can be of this machine and PID namespace. One that is stuck shows only its name, which
    may be any."""
    pid, file = beat.pid, run.heartbeat(beat.rank)
    if not procfs.is_closed(pid):
        return maps(pid, file)
    users = owner.uid(Path(f"/proc/{pid}")), owner.unknown()
    return (
        owner.uid(file) in users
        and procfs.begun_by(pid, beat.wall_time)
        and (procfs.is_python(pid) or _is_stuck(pid))
        and _has_this_clock(beat)
        and _has_these_pids(run)
    )


def maps(pid: int, file: Path) -> bool:
    """Has it mapped this heartbeat?"""
    return procfs.maps(pid, f"{file.resolve()}\n")


def _is_stuck(pid: int) -> bool:
    try:
        proc_memory.read(pid, "cmdline")
    except proc_memory.Blocked:
        return True
    except OSError:  # has exited
        pass
    return False


def _has_this_clock(beat: HeartbeatRecord) -> bool:
    """Each machine has its own time of boot, where the monotonic clock begins."""
    boot, here = beat.wall_time - beat.monotonic_ns / 1e9, time.time() - time.monotonic()
    return abs(boot - here) <= procfs.CLOCK_SLACK_S


def _has_these_pids(run: rundir.RunDir) -> bool:
    """Not where the start was in a container, whose host name may be any."""
    known, here = rundir.read_json(run.plan), standing.pid_namespace()
    return (dig(known, "starter", "pid_namespace") or here) == here
