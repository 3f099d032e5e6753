"""The rank that the others waited for when torch's timeout of a collective has ended one of them:
the only running one that is not in a collective."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from training.core.messages import msg
from training.core.rundir import RunDir
from training.diagnose import error_reports
from training.watchdog import hang_dump, loader_workers, rank_exit, stall_detector, wrapped
from training.watchdog.gpu_waits import BACKWARD
from training.watchdog.hang_report import HANG, HangFinding
from training.watchdog.probes import waits
from training.watchdog.probes.sampling import take
from training.watchdog.probes.stacks import Thread, own
from training.watchdog.probes.trace import RankTrace, courses

BETWEEN_S = 0.4


def of_timeout(
    run: RunDir,
    ranks: Mapping[int, int],
    reporter: int,
    where: str | None,
    unwritten: Mapping[int, str],
    log_from: Mapping[Path, int],
) -> HangFinding:
    """As find(), with its evidence from the files of the run, where the stacks are kept. `ranks`:
    rank → PID of the children that run; `unwritten`, `log_from`: of the attempt's Outcome."""
    pids = wrapped.trainings(ranks)
    reported = {error["rank"] for error in error_reports.of_all(run, unwritten)}
    waits_too = functools.partial(rank_exit.waits_too, run, log_from=log_from)
    found = find(pids, reporter, where, reported, waits_too)
    return hang_dump.keep_stacks(run, found) if found.stacks else found


def find(
    pids: Mapping[int, int],
    reporter: int,
    where: str | None,
    reported: Collection[int],
    waits_too: Callable[[int], bool | None],
) -> HangFinding:
    """`pids`: rank → PID of the running ranks; `reporter`: the rank that was ended, at `where`;
    `reported`: ranks with an error report: they exit; `waits_too`: does a rank wait by other
    evidence than its stack (None: unknown)? The rank of the result is None if none or several are
    not in a collective. Takes about half a second."""
    first = take(pids)
    time.sleep(BETWEEN_S)
    seen = {
        rank: c
        for rank, c in courses([first, take(pids)]).items()
        if rank not in reported and not (c.last.main and waits.at_exit(c.last.main))
    }
    away = [c for c in seen.values() if not _waits(c, waits_too(c.rank))]
    c = away[0] if len(away) == 1 and away[0].frames else None
    places = {rank: stall_detector.doing(o) for rank, o in seen.items() if o is not c}
    places[reporter] = msg("watchdog.missing.timed_out", at=_at(where))
    stacks = {rank: o.last.stack for rank, o in seen.items()}
    if c is None:
        return HangFinding(HANG, None, None, msg("watchdog.missing.unknown"), places, stacks, 0.0)
    how, frame = stall_detector.doing(c), own(c.frames)
    if c.last.main and waits.waits_for_worker(c.last.main):
        how, at_worker = loader_workers.at_worker(c)
        frame = at_worker or frame
    place = f"{frame.file}:{frame.line}" if frame else None
    return HangFinding(HANG, c.rank, place, how, places, stacks, c.seconds)


def _waits(c: RankTrace, too: bool | None) -> bool:
    """Is it in a collective in one of the samples? A stopped rank is not waiting, nor one whose
    GPU or backward computes since nothing is pending there. `too`: other evidence."""
    if too or c.always("Tt"):
        return bool(too)
    return any(
        _waits_there(look.main, gpu=look.gpu, idle=too is False)
        for look in c.looks
        if look.main and look.main.frames
    )


def _waits_there(main: Thread, *, gpu: bool, idle: bool) -> bool:
    name = waits.in_collective(main)
    if name is None or name == BACKWARD:
        device = gpu and waits.waits_for_device(main.frames[0])
        return (name == BACKWARD or device) and not idle
    return True


def _at(where: str | None) -> str:
    return msg("watchdog.at", frame=where) if where else ""
