"""First report on a failed rank: how it exited, and where. The failure card follows when all ranks
have exited."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from training.core import cause_ids, exit_status, rundir
from training.core.errors import Exit
from training.core.messages import msg
from training.core.plain_text import one_line, shortened
from training.core.tail import tail
from training.diagnose import error_reports, exception_cause
from training.watchdog import printed_steps
from training.watchdog.hang_report import DESYNC, UNEVEN, HangFinding
from training.watchdog.probes import flight_recorder, stacks, waits

if TYPE_CHECKING:
    from training.core.contracts.kinds import ExitKind
    from training.diagnose.root_cause import RootCause
    from training.watchdog.probes.flight_recorder import Call
    from training.watchdog.probes.stacks import Stack

DIED: Final = "died"  # by a signal or with a status
ERROR: Final = "error"  # by an exception that it reported
# Not a failure by itself, but the cause where other ranks then lose their peer.
QUIET = (int(Exit.DONE), int(Exit.PREEMPTED), int(Exit.INTERRUPTED))
LINES = 40
DUMP_LINES = 4000
CRASHED = "Fatal Python error: "
# gloo aborts a rank that receives data of another collective.
MIXED_UP = re.compile(r"op\.preamble\.\S+ \S+ \S+ (\d+) vs (\d+)")


@dataclass(frozen=True)
class RankExit:
    """`rank` is the guilty one, which may differ from the rank that failed; None where unknown."""

    kind: ExitKind
    rank: int | None
    where: str | None  # file:line
    how: str

    @property
    def label(self) -> str:
        return "FAILED" if self.kind == ERROR else self.kind.upper()


def left_before(
    run: rundir.RunDir,
    rank: int,
    gone: Sequence[tuple[int | None, int]],
    log_from: Mapping[Path, int],
) -> tuple[int, int] | None:
    """(rank, exit status) of the rank of a script that exited with a status in QUIET before this
    one lost its peer. `gone`: the exits so far, in order."""
    left = [(other, status) for other, status in gone if other is not None and status in QUIET]
    ends = {
        int(p.stem[4:]): (float(facts["time"]), int(facts.get("status", 0)))
        for p in run.ranks.glob("rank*.ended")
        if (facts := rundir.read_json(p))
    }
    errors = {error["rank"]: error for error in error_reports.of_all(run)}
    if (error := errors.get(rank)) is not None:
        if not exception_cause.lost_peer(error) or any(
            e["time"] <= error["time"] and not exception_cause.lost_peer(e) for e in errors.values()
        ):
            return None  # its own failure, or that of another rank
        # A process with much to tear down exits late: the end of the script counts.
        left += [
            (other, status)
            for other, (at, status) in sorted(ends.items(), key=lambda end: end[1])
            if at <= error["time"]
        ]
    elif left:
        log = run.rank_log(rank)
        logged = exception_cause.of_log(log, rank, log_from.get(log, 0))
        if logged is None or logged.cause != cause_ids.PEER_DIED:
            return None
    return next((end for end in left if end[0] != rank), None)


def lost_peer(log: Path, rank: int, log_from: Mapping[Path, int]) -> bool:
    """Does the log of all ranks end with the loss of a peer, which another rank than this one has
    reported?"""
    logged = exception_cause.of_log(log, None, log_from.get(log, 0))
    if logged is None or logged.cause != cause_ids.PEER_DIED:
        return False
    return logged.event is None or logged.event.rank != rank


def explain(
    run: rundir.RunDir,
    rank: int,
    status: int,
    alive: Iterable[int],
    log_from: Mapping[Path, int],
    victim: int | None = None,
) -> RankExit:
    """How and where this rank exited. `alive`: the running ranks; `log_from`: log → offset of this
    attempt; `victim`: the rank that lost this one."""
    if error := error_reports.of_rank(run, rank):
        if error["type"] == exception_cause.LEFT:
            return RankExit(DIED, rank, error["where"] or None, exception_cause.left(error))
        return RankExit(
            ERROR,
            error["guilty_rank"],
            error["where"],
            error_reports.named(error, shortened(_said(error["message"]), 200)),
        )
    stack = _at_crash(run, rank, status, log_from)
    frames = stack.crashed.frames if stack and stack.crashed else ()
    # NCCL aborts a rank that reports an error of CUDA: the place is in its log
    frame = None if stacks.after_exception(frames) else stacks.own(frames)
    where = f"{frame.file}:{frame.line}" if frame else None
    if status in QUIET and (left := rundir.read_json(run.ranks / f"rank{rank}.ended")):
        where = left["where"] or None
        if status == Exit.DONE and not where and victim is not None:  # the end of the script
            how = _uneven(run, victim) + printed_steps.shown(run, log_from)
            return RankExit(UNEVEN, rank, None, how)
    log = run.rank_log(rank)
    sizes = MIXED_UP.search("\n".join(tail(log, LINES, log_from.get(log, 0))))
    if status < 0 and sizes:
        inside = waits.in_collective(stack.main) if stack and stack.main else None
        how = msg(
            "watchdog.exit.mixed_up",
            rank=rank,
            got=sizes[1],
            collective=inside or msg("watchdog.exit.collective"),
            expected=sizes[2],
        )
        last = _last_calls(run, rank, alive)
        others = "; ".join(
            msg("watchdog.exit.in_collective", rank=other, number=call.number, call=call)
            for other, call in sorted(last.items())
        )
        return RankExit(
            DESYNC,
            None,
            where,
            msg("watchdog.exit.with_others", how=how, others=others) if others else how,
        )
    return RankExit(DIED, rank, where, exit_status.how(status))


def _last_calls(run: rundir.RunDir, rank: int, alive: Iterable[int]) -> dict[int, Call]:
    """The newest collective of each other rank: by itself, or by its report where it fails in the
    meantime, since it has lost this one."""
    last = {
        other: calls[-1] for other in alive if (calls := flight_recorder.read(run.ranks, other))
    }
    for error in error_reports.of_all(run):
        if error["rank"] not in (rank, *last) and "collective" in error:
            with contextlib.suppress(*flight_recorder.UNREADABLE):
                last[error["rank"]] = flight_recorder.call_of(error["collective"])
    return last


def _at_crash(
    run: rundir.RunDir, rank: int, status: int, log_from: Mapping[Path, int]
) -> Stack | None:
    """By faulthandler: in the rank's file, or in its log where the script itself enables it."""
    stack = stacks.from_faulthandler(run.ranks / f"rank{rank}.stacks")
    if stack or status >= 0:
        return stack
    log = run.rank_log(rank)
    lines = tail(log, DUMP_LINES, log_from.get(log, 0))
    begins = [at for at, line in enumerate(lines) if line.startswith(CRASHED)]
    return stacks.in_dump(lines[begins[-1] :]) if begins else None


def _uneven(run: rundir.RunDir, victim: int) -> str:
    error = error_reports.of_rank(run, victim)
    at = msg("watchdog.at", frame=error["where"]) if error and error["where"] else ""
    return msg("watchdog.exit.uneven", rank=victim, at=at)


def timed_out(run: rundir.RunDir, rank: int, status: int, log_from: Mapping[Path, int]) -> bool:
    """Was it ended by torch's timeout of a collective: by an exception, or aborted by the watchdog
    of NCCL?"""
    if (error := error_reports.of_rank(run, rank)) is not None:
        return exception_cause.timed_out(error)
    return -status == signal.SIGABRT and exception_cause.timed_out_by_log(
        _logged(run, rank, log_from)
    )


def waits_too(run: rundir.RunDir, rank: int, log_from: Mapping[Path, int]) -> bool | None:
    """Does this running rank wait just as much as one that has timed out: has it an unfinished
    collective, or reached the same timeout? None: unknown."""
    logged = _logged(run, rank, log_from)
    signalled = exception_cause.only_signalled(logged)
    own = exception_cause.timed_out_by_log(logged)
    if own and not signalled:
        return True
    pending = flight_recorder.pending(run.ranks, rank)
    return True if signalled and pending is None else pending


def _logged(run: rundir.RunDir, rank: int, log_from: Mapping[Path, int]) -> RootCause | None:
    log = run.rank_log(rank)
    return exception_cause.of_log(log, rank, log_from.get(log, 0))


def waited_for(missing: HangFinding, own: RankExit, reporter: int) -> RankExit:
    """The exit of the rank that timed out, with the rank that it waited for as the guilty one."""
    if missing.rank is None:
        how = msg("watchdog.exit.waited", rank=reporter, error=own.how)
    else:
        how = msg("watchdog.exit.waited_for", how=missing.how, rank=reporter, error=own.how)
    return RankExit(own.kind, missing.rank, missing.where, how)


def _said(message: str) -> str:
    """An exception's message in one line, without the hints that torch adds to every CUDA error."""
    for hint in ("\nSearch for `", "\nCUDA kernel errors might be"):
        message = message.partition(hint)[0]
    return one_line(message.strip())
