"""The failure with which the output of a rank ends, where its exit status shows none: its script
has caught and printed the exception, or only another launcher knows the status."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from training.diagnose import exception_cause
from training.diagnose.log_line import shown
from training.diagnose.traceback import Traceback
from training.watchdog.hang_report import HangFinding
from training.watchdog.probes import waits
from training.watchdog.probes.stacks import Stack
from training.watchdog.rank_exit import ERROR, RankExit

READ_BYTES = 1 << 14  # from the last line of the traceback on
# messages of torch at the exit of a process
_OF_TORCH = re.compile(rb"(?:\[rank\d+\]:)?\[[WE][\d :.]*\w+\.cpp:\d+\]")


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


def _is_end(log: Path, thrown: Traceback) -> bool:
    try:
        with log.open("rb") as file:
            file.seek(thrown.last)
            _, *after = file.read(READ_BYTES).splitlines() or [b""]
    except OSError:
        return False
    return not any(line.strip() and not _OF_TORCH.match(line) for line in after)
