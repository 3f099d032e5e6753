"""What follows a restart: the first new step and, with another number of ranks, the time of a
step."""

from __future__ import annotations

import statistics
from itertools import islice
from typing import TYPE_CHECKING

from training.core import heartbeat, jsonl, log, rundir, units
from training.core.messages import msg
from training.core.read_backwards import backwards

if TYPE_CHECKING:
    from pathlib import Path

    from training.core.contracts.events import RecoveredFacts, RestartFacts

SETTLED = 2  # steps after a start that are slower than the others
MEASURED = 8  # steps whose median is the time of a step
RECENT = 200  # last records of metrics.jsonl, with those of evaluations


class Resumption:
    """`look()` is called repeatedly while ranks run. A script has no heartbeat: it is not
    watched."""

    def __init__(self, run: rundir.RunDir) -> None:
        self._run = run
        self._restart: RestartFacts | None = None  # the last one
        self._failed_at = 0.0
        self._waits = False  # for the first step
        self._ranks: tuple[int, int] | None = None  # whose time of a step is still to be measured
        self._before_ms = 0.0
        # first step of this start, 0 of the first one; None: no step yet
        self._first: int | None = 0

    @property
    def trains(self) -> bool:
        """Whether the ranks have trained since the last restart."""
        return not self._waits

    def begin(self, restart: RestartFacts, failed_at: float, ranks: tuple[int, int]) -> None:
        """`restart` is corrected if it resumes from an earlier step than planned; `ranks`: before
        and after."""
        self._restart, self._failed_at, self._waits = restart, failed_at, True
        step = restart["step"]
        times = (
            []
            if self._first is None
            else list(_step_times(self._run.metrics, self._first + SETTLED, step).values())
        )
        comparable = ranks[0] != ranks[1] and bool(times)
        self._ranks = ranks if comparable else None
        self._before_ms = statistics.median(times) if comparable else 0.0
        self._first = None

    def look(self) -> None:
        if not self._waits and self._ranks is None:
            return
        beat = heartbeat.read(self._run.heartbeat(0))
        if beat is None or not beat.stepped:
            return
        assert self._restart is not None
        if self._waits:
            self._waits, self._first = False, beat.first_step
            self._resumed(self._restart, beat.first_step, beat.wall_time - self._failed_at)
        assert self._first is not None
        if self._ranks and beat.step > self._first + SETTLED + MEASURED:
            self._measure(self._restart["attempt"], self._ranks, self._first + SETTLED)

    def _resumed(self, restart: RestartFacts, first: int, seconds: float) -> None:
        saved = first - 1
        lost = restart["step"] - saved
        facts: RecoveredFacts = {
            "attempt": restart["attempt"],
            "step": first,
            "seconds": seconds,
            "resumes_at": saved,
            "steps_lost": lost,
        }
        if saved == restart["resumes_at"]:
            log.info(msg("launcher.restart.resumed", seconds=seconds))
        else:  # the weights of a checkpoint are verified by the ranks, which skip a damaged one
            text = msg(
                "launcher.restart.resumed_earlier",
                seconds=seconds,
                step=saved,
                planned=restart["resumes_at"],
                steps=units.plural(lost, "step"),
            )
            log.warning(text)
            facts["text"] = text
            restart["resumes_at"], restart["steps_lost"] = saved, lost
            restart["text"] += f"; {text}"
        self._run.event("recovered", **facts)

    def _measure(self, attempt: int, ranks: tuple[int, int], first: int) -> None:
        """`first`: step to begin with."""
        times = _step_times(self._run.metrics, first, None)
        if len(times) < MEASURED:
            return
        self._ranks = None
        after = statistics.median(list(times.values())[:MEASURED])
        expected, slowdown = ranks[0] / ranks[1], after / self._before_ms
        text = msg(
            "launcher.elastic.pace",
            then=units.plural(ranks[1], "rank"),
            now=ranks[0],
            after=after,
            before=self._before_ms,
            slowdown=slowdown,
            expected=expected,
        )
        log.info(text)
        self._run.event(
            "pace",
            attempt=attempt,
            ranks=list(ranks),
            step_ms=[self._before_ms, after],
            expected_slowdown=expected,
            slowdown=slowdown,
            text=text,
        )


def _step_times(metrics: Path, first: int, last: int | None) -> dict[int, float]:
    """Step → its milliseconds, of the recent steps from `first` to `last`."""
    found: dict[int, float] = {}
    for record in islice(backwards(metrics), RECENT):
        step, took = jsonl.whole(record.get("step")), jsonl.number(record.get("step_ms"))
        if step is not None and took and first <= step and (last is None or step <= last):
            found.setdefault(step, took)  # an earlier record is of a discarded part
    return dict(sorted(found.items()))
