"""Error file of a failing rank: exception, place and time, so that tracebacks need not be
parsed."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING

from training.core import heartbeat, libraries, rundir
from training.core.errors import DISK_FULL, RANK_DISK_FULL, RANK_FAILED, RunStopped, UserError
from training.trainer import compiled_error, flight_recorder_server, memory_snapshot

if TYPE_CHECKING:
    from training.core.contracts.verdict import ExhaustedMemoryRecord, RankErrorRecord

CHAIN = 8  # of exceptions: an error raised from itself has no end
_reserved: list[int] = []
SIGCHLD_S = 0.2


def reserve() -> None:
    """Reserve file descriptors for the error report of a process that has none left: log, temporary
    file, source file of the traceback."""
    if not _reserved:
        _reserved.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(3))


def record(run: rundir.RunDir, rank: int, error: BaseException) -> int:
    """Write ranks/rank<r>.error.json, and the traceback to the rank's log; to the console, before
    the failure card, only if they cannot be written. `error`: as final() returns it. Returns the
    exit status."""
    while _reserved:
        os.close(_reserved.pop())
    facts = _facts(run, rank, error)
    status = RANK_DISK_FULL if facts["disk_full"] else RANK_FAILED
    text = "".join(facts["traceback"])
    logged = _log(run, rank, text)
    if memory := _memory(run, rank, error):
        facts["memory"] = memory
    if call := flight_recorder_server.last_call():
        facts["collective"] = call
    try:
        rundir.write_json(run.rank_error(rank), facts)
        if logged:
            return status
    except OSError:
        pass
    # the disk is full, probably the cause itself: use the console
    sys.stderr.write(f"{error}\n" if facts["disk_full"] else text)
    sys.stderr.flush()
    return status


def _log(run: rundir.RunDir, rank: int, text: str) -> bool:
    """First, and without waiting for the disk: after an error of CUDA, NCCL may abort this process
    before its report is written."""
    try:
        with run.rank_log(rank).open("a") as log:
            log.write(text)
        return True
    except OSError:
        return False


def _memory(run: rundir.RunDir, rank: int, error: BaseException) -> ExhaustedMemoryRecord | None:
    try:
        return memory_snapshot.keep(run, rank, error)
    # A disk without room for it, another form of torch's snapshot: the error itself is reported.
    except Exception:
        return None


def final(error: BaseException) -> BaseException:
    """The final error. A killed data-loader worker is detected twice: by its connection, and by
    torch's SIGCHLD handler, whose message is more specific. Wait for that one, then disable the
    handler: it must not raise while the report is written. Where it has interrupted torch's loader,
    that has raised a vague error from it.

    Raises the RuntimeError of that handler if it runs on the way into this function: call this
    again with that error."""
    try:
        if isinstance(error, (ConnectionError, EOFError)):
            time.sleep(SIGCHLD_S)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except RuntimeError as found:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        found.__context__ = error
        return found
    exact = error.__cause__
    if isinstance(exact, RuntimeError) and str(exact).startswith("DataLoader worker"):
        return exact.with_traceback(error.__traceback__)
    return error


def note(run: rundir.RunDir, rank: int, error: UserError) -> None:
    """Write ranks/rank<r>.error.json of a run that stops itself and has reported why, or of a rank
    that rejects its input. Without room for it, print the cause, which the supervisor finds
    (training.launcher.output)."""
    file = run.rank_error(rank)
    if isinstance(error, RunStopped):
        facts = _facts(run, rank, error.cause)
        facts["stopped"] = str(error)
    else:
        facts = _facts(run, rank, error)
        facts["rejected"] = [
            {"code": one.code, "text": "\n".join(one.lines())} for one in error.problems
        ]
    facts["exit_code"] = int(error.code)
    try:
        rundir.write_json(file, facts)
    except OSError as full:
        cause = " ".join(f"{type(error).__name__}: {facts['message']}".split())
        where = f" at {facts['where']}" if facts["where"] else ""
        print(f"{file} cannot be written: {full.strerror}; {cause}{where}", file=sys.stderr)


def _facts(run: rundir.RunDir, rank: int, error: BaseException) -> RankErrorRecord:
    disk_full = isinstance(error, OSError) and error.errno in DISK_FULL
    kind, message, traced = compiled_error.unwrap(error)
    frames = [*traceback.extract_tb(error.__traceback__), *traced]
    own = [f for f in frames if not libraries.contain_here(f.filename)] or frames
    if not getattr(error, "of_code", True):
        own = []
    where = f"{own[-1].filename}:{own[-1].lineno}" if own else ""
    beat = heartbeat.read(run.heartbeat(rank))
    facts: RankErrorRecord = {
        "rank": rank,
        "guilty_rank": getattr(error, "rank", rank),  # this rank may detect another rank's error
        "time": time.time(),
        "type": kind,
        "message": message,
        "where": where,
        "code": own[-1].line if own else None,
        "phase": str(beat) if beat else None,
        "disk_full": disk_full,
        "traceback": traceback.format_exception(type(error), error, error.__traceback__),
    }
    of_system = error if isinstance(error, OSError) else _full_disk(error)
    # shutil names both files of a copy, the source first
    named = (of_system.filename2 or of_system.filename) if of_system else None
    if isinstance(named, str):
        facts["file"] = os.path.abspath(named)
    return facts


def _full_disk(error: BaseException) -> OSError | None:
    """The full disk from which another error was raised, such as one of torch.compile."""
    before: BaseException | None = error
    for _ in range(CHAIN):
        if before is None or (isinstance(before, OSError) and before.errno in DISK_FULL):
            return before
        inner = getattr(before, "inner_exception", None)
        before = inner or before.__cause__ or before.__context__
    return None
