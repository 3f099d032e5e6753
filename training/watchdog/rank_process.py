"""Whether a process is the one that writes a heartbeat, rather than one that reuses its PID."""

from __future__ import annotations

from pathlib import Path

from training.core import owner
from training.core.heartbeat import HeartbeatRecord
from training.watchdog.probes import procfs


def writes(beat: HeartbeatRecord, file: Path) -> bool:
    """Is it that of `beat`? The mappings of another user's process cannot be read: there it is the
    one if this user has written the file, as far as that is shown, and it is older than the
    beat."""
    if not procfs.is_closed(beat.pid):
        return maps(beat.pid, file)
    users = owner.uid(Path(f"/proc/{beat.pid}")), owner.unknown()
    return owner.uid(file) in users and procfs.begun_by(beat.pid, beat.wall_time)


def maps(pid: int, file: Path) -> bool:
    """Has it mapped this heartbeat?"""
    return procfs.maps(pid, f"{file.resolve()}\n")
