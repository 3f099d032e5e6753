"""What a failing rank leaves behind: one file with exception, place and time, so that nobody needs
to parse tracebacks."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING

from training.core import heartbeat, rundir
from training.core.errors import RANK_DISK_FULL, RANK_FAILED, RunStopped

if TYPE_CHECKING:
    from training.core.contracts.verdict import RankErrorRecord

_reserved: list[int] = []
SIGCHLD_S = 0.2


def reserve() -> None:
    """Descriptors for the last words of a process that has none left: a log, a temporary file, a
    source file for the traceback."""
    if not _reserved:
        _reserved.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(3))


def record(run: rundir.RunDir, rank: int, error: BaseException) -> int:
    """Write ranks/rank<r>.error.json, and the traceback to the rank's own log; to the console only
    where no supervisor shows the one card that matters (a victim's traceback is no news). Returns
    the status to leave with."""
    while _reserved:
        os.close(_reserved.pop())
    error = _last_word(error)
    facts = _facts(run, rank, error)
    status = RANK_DISK_FULL if facts["disk_full"] else RANK_FAILED
    text = "".join(facts["traceback"])
    try:
        rundir.write_json(run.rank_error(rank), facts)
        if "DUET_SUPERVISED" in os.environ:
            with run.rank_log(rank).open("a") as log:
                log.write(text)
            return status
    except OSError:  # a full disk, most likely the very cause: then the console has to do
        if facts["disk_full"]:
            text = f"{error}\n"
    sys.stderr.write(text)
    sys.stderr.flush()
    return status


def _last_word(error: BaseException) -> BaseException:
    """A killed worker of the data loader is noticed twice: by its connection, and by torch's
    handler of SIGCHLD, which says who and how. That one is waited for, and after it none may come:
    it would raise in the middle of what is written here."""
    try:
        if isinstance(error, (ConnectionError, EOFError)):
            time.sleep(SIGCHLD_S)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except RuntimeError as told:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        told.__context__ = error
        return told
    return error


def note(run: rundir.RunDir, rank: int, error: RunStopped) -> None:
    """Write ranks/rank<r>.error.json of a run that stops itself, and has said why."""
    with contextlib.suppress(OSError):
        rundir.write_json(
            run.rank_error(rank), {**_facts(run, rank, error.cause), "stopped": str(error)}
        )


def _facts(run: rundir.RunDir, rank: int, error: BaseException) -> RankErrorRecord:
    disk_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        f for f in frames if "site-packages" not in f.filename and not f.filename.startswith("<")
    ] or list(frames)
    where = f"{ours[-1].filename}:{ours[-1].lineno}" if ours else ""
    beat = heartbeat.read(run.heartbeat(rank))
    return {
        "rank": rank,
        "guilty_rank": getattr(error, "rank", rank),  # what another rank did can be noticed here
        "time": time.time(),
        "type": type(error).__name__,
        "message": str(error),
        "where": where,
        "code": ours[-1].line if ours else None,
        "phase": str(beat) if beat else None,
        "disk_full": disk_full,
        "traceback": traceback.format_exception(type(error), error, error.__traceback__),
    }
