"""The GPUs that this user's launches on this machine have chosen. Those of another launch look
empty until its ranks have started, and while it waits for its next attempt.

A file for each launch, valid while the process lives, in the folder for temporary files, which
machines may share. The next look at the GPUs of the machine removes those of ended launches. The
runtime folder of a login would not do: cron has none, and the last logout removes it. Claims only
move a preference: where the folder cannot be used, a launch chooses without them.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from training.core import file_lock, rundir, standing
from training.host.gpu_processes import UNKNOWN
from training.host.gpus import Gpu


@contextmanager
def choosing() -> Iterator[None]:
    """From the look at the GPUs to claim(), one launch at a time."""
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(file_lock.held(_folder()))
        yield


def others() -> dict[str, int]:
    """PID of the launch by the UUID of each GPU that another launch has chosen."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for file in sorted(_folder().glob(_name("*"))):
            record = rundir.read_json(file)
            if record is None or not standing.runs_here(record, 0.0):
                file.unlink(missing_ok=True)
            elif standing.is_here(record) and record["pid"] not in (os.getpid(), os.getppid()):
                found |= dict.fromkeys(record["gpus"], int(record["pid"]))
    found.pop(UNKNOWN, None)
    return found


def claim(pid: int, gpus: Iterable[Gpu]) -> None:
    """`pid`: of the process that starts the ranks."""
    with suppress(OSError):
        record = {**standing.identity(pid), "gpus": [gpu.uuid for gpu in gpus]}
        file = _folder() / _name(pid)
        rundir.write_json(file, record)
        # systemd removes files in /tmp that are older than 10 days, but none with the sticky bit
        file.chmod(stat.S_ISVTX | stat.S_IRUSR | stat.S_IWUSR)


def release(pid: int) -> None:
    with suppress(OSError):
        (_folder() / _name(pid)).unlink(missing_ok=True)


def _name(pid: int | str) -> str:
    return f"{os.uname().nodename}-{pid}.json"


def _folder() -> Path:
    """Raises OSError."""
    folder = Path(tempfile.gettempdir()) / f"duet-gpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise PermissionError(f"{folder} is not a folder of this user")
    return folder
