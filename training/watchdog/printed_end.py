"""The failure with which the output of a rank ends, where its exit status shows none: its script
has caught and printed the exception, or only another launcher knows the status."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from training.core import cause_ids
from training.core.messages import msg
from training.core.rundir import RunDir
from training.diagnose import exception_cause
from training.diagnose.log_line import shown
from training.diagnose.traceback import Traceback
from training.watchdog.hang_report import HangFinding
from training.watchdog.probes import waits
from training.watchdog.probes.stacks import Stack
from training.watchdog.rank_exit import ERROR, RankExit

READ_BYTES = 1 << 14  # from the last line of the traceback on
_LAST_ERROR = b"Last error:"  # of NCCL, with the error on the next line
# empty, torch's messages at the exit of a process, or further lines of its exceptions
_OF_TORCH = re.compile(
    rb"(?:\[rank\d+\]:)?\s*(?:$|\[[WE][\d :.]*\w+\.cpp:\d+\]|CUDA kernel errors might |Search for `"
    rb"|For debugging consider |Compile with `TORCH_USE_CUDA_DSA|Device-side assert|nccl\w+: "
    rb"|It can be also caused by |Exception raised from |frame #\d+: |" + _LAST_ERROR + rb")"
)


def is_over(found: HangFinding, ended: Collection[int]) -> bool:
    """Has the guilty rank ended, or is it stuck at its exit?"""
    stack = found.stacks.get(found.rank) if found.rank is not None else None
    main = stack.main if isinstance(stack, Stack) else None
    return found.rank in ended or (main is not None and waits.at_exit(main))


def of_rank(log: Path, rank: int, since: int, *, alone: bool) -> RankExit | None:
    """`since`: begin of this attempt in `log`; `alone`: only this rank prints there. It may have
    survived an exception and finished: then only one at the very end counts."""
    logged = exception_cause.of_log(log, rank, since)
    if logged is None or logged.event is None or logged.rank not in (None, rank):
        return None
    thrown = logged.event.thrown
    if alone and not (thrown and _is_end(log, thrown)):
        return None
    return RankExit(ERROR, rank, logged.event.where, shown(logged.event.line.text.strip()))


def survived(run: RunDir, ranks: Iterable[int], since: Mapping[Path, int]) -> list[str]:
    """Exceptions that these ranks have printed and survived, in one line each. `since`: log → begin
    of this attempt."""
    found = []
    for rank in ranks:
        log = run.rank_log(rank)
        logged = exception_cause.of_log(log, rank, since.get(log, 0))
        event = logged.event if logged and logged.cause != cause_ids.PEER_DIED else None
        if event and event.thrown:
            at = msg("watchdog.at", frame=event.where) if event.where else ""
            error = shown(event.line.text.strip())
            found.append(msg("watchdog.printed.survived", rank=rank, error=error, at=at))
    return found


def _is_end(log: Path, thrown: Traceback) -> bool:
    try:
        with log.open("rb") as file:
            file.seek(thrown.last)
            _, *after = file.read(READ_BYTES).splitlines() or [b""]
    except OSError:
        return False
    return all(
        _OF_TORCH.match(line) or _LAST_ERROR in before
        for before, line in zip([b"", *after], after, strict=False)
    )
