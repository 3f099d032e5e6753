"""The first words on a rank that has died: how, and where, as far as it has left that. The card
comes when all the others are gone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from training.core import exit_status, run_reader, rundir
from training.core.errors import Exit
from training.core.tail import tail
from training.diagnose import exception_cause
from training.host.gpus import one_line
from training.watchdog.hang_report import DESYNC
from training.watchdog.probes import flight_recorder, stacks

if TYPE_CHECKING:
    from training.core.contracts.kinds import ExitKind

DIED: Final = "died"  # by a signal or with a status
ERROR: Final = "error"  # by an exception that it could tell
# Not a failure by itself; where other ranks then lose their peer, it is where the failure begins.
QUIET = (int(Exit.DONE), int(Exit.PREEMPTED), int(Exit.INTERRUPTED))
LINES = 40
# gloo aborts a rank that gets data of another collective than it is in.
MIXED_UP = re.compile(r"op\.preamble\.\S+ \S+ \S+ (\d+) vs (\d+)")


@dataclass(frozen=True)
class RankExit:
    """`rank` is the guilty one: what another rank did can be noticed by this one. None where it can
    not be told."""

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
    """(rank, exit status) of the rank of a script that left before this one lost its peer, with a
    status in QUIET. `gone`: the exits so far, in the order in which they happened."""
    left = [(other, status) for other, status in gone if other is not None and status in QUIET]
    ends = {
        int(p.stem[4:]): (float(facts["time"]), int(facts.get("status", 0)))
        for p in run.ranks.glob("rank*.ended")
        if (facts := rundir.read_json(p))
    }
    errors = {
        int(e["rank"]): e
        for p in run.ranks.glob("rank*.error.json")
        if (e := run_reader.read_rank_error(p))
    }
    if (error := errors.get(rank)) is not None:
        if not exception_cause.lost_peer(error) or any(
            e["time"] <= error["time"] and not exception_cause.lost_peer(e) for e in errors.values()
        ):
            return None  # it failed by itself, or another one did
        # The end of a process is seen late where much has to be torn down: the script's own end
        # counts.
        left += [
            (other, status)
            for other, (at, status) in sorted(ends.items(), key=lambda end: end[1])
            if at <= error["time"]
        ]
    elif left:
        log = run.rank_log(rank)
        told = exception_cause.of_log(log, rank, log_from.get(log, 0))
        if told is None or told.cause != exception_cause.PEER_DIED:
            return None
    return next((end for end in left if end[0] != rank), None)


def explain(
    run: rundir.RunDir, rank: int, status: int, alive: Iterable[int], log_from: Mapping[Path, int]
) -> RankExit:
    """`alive`: the ranks that are still there; `log_from`: log → where the words of this start
    begin."""
    if error := run_reader.read_rank_error(run.rank_error(rank)):
        if error["type"] == exception_cause.LEFT:
            return RankExit(DIED, rank, error["where"] or None, exception_cause.left(error))
        return RankExit(
            ERROR,
            error["guilty_rank"],
            error["where"],
            f"{error['type']}: {one_line(error['message'])[:200]}",
        )
    stack = stacks.from_faulthandler(run.ranks / f"rank{rank}.stacks")  # a crash leaves it
    frame = stacks.own(stack.main.frames) if stack and stack.main else None
    where = f"{frame.file}:{frame.line}" if frame else None
    if status in QUIET and (left := rundir.read_json(run.ranks / f"rank{rank}.ended")):
        where = left["where"] or None
    log = run.rank_log(rank)
    sizes = MIXED_UP.search("\n".join(tail(log, LINES, log_from.get(log, 0))))
    if status < 0 and sizes:
        inside = stacks.in_collective(stack.main) if stack and stack.main else None
        how = (
            f"rank {rank} got {sizes[1]} bytes where its {inside or 'collective'} awaits "
            f"{sizes[2]}, and was aborted by gloo"
        )
        last = {
            other: calls[-1] for other in alive if (calls := flight_recorder.read(run.ranks, other))
        }
        others = "; ".join(
            f"rank {other} is in collective {call.number}, {call}" for other, call in last.items()
        )
        return RankExit(
            DESYNC,
            None,
            where,
            f"{how}: the ranks do not call the same" + (f"; {others}" if others else ""),
        )
    return RankExit(DIED, rank, where, exit_status.how(status))
