"""Analysis of the reports of all ranks, on rank 0: steps, stragglers, ranks without data; see also
start_checks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from . import start_checks
from .messages import msg
from .reporting import MANY, Finding, joined, ranks
from .shared_store import SharedStore
from .step_timer import WINDOW

if TYPE_CHECKING:
    from training.inspector.exchange import (
        RankProgress,
        StartReport,
        StepRow,
    )

COSTS = 0.05  # share of a step that a slow rank must cost to be reported
LEAST_MS = 2.0
NAMED_S = 5.0  # standstill of the other ranks before the rank they wait for is reported
EARLY = (1, 10)  # steps that are always checked


def due(step: int, every: int) -> bool:
    return every > 0 and (step in EARLY or step % every == 0)


def next_due(step: int, every: int) -> int:
    """The first step after `step` that is due."""
    return min([early for early in EARLY if early > step] + [step - step % every + every])


class Judge:
    """Analysis of the reports. `report(text, **facts)` and `find(finding)` receive the results;
    `slow`: factor over the own time of the other ranks; `patience_s`: maximum standstill of the
    other ranks."""

    def __init__(
        self,
        board: SharedStore,
        report: Callable[..., None],
        find: Callable[[Finding], None],
        *,
        every: int,
        slow: float,
        patience_s: float,
        disjoint: bool,
    ) -> None:
        self._board, self._report, self._find = board, report, find
        self._every, self._slow, self._disjoint = every, slow, disjoint
        self.named_s = min(NAMED_S, patience_s / 2)
        self._starts: list[StartReport] | None = None
        self._compared = False  # whether the samples were compared
        self._due = next_due(0, every) if every else 0
        # rank → its last state, time of its last change
        self._changed: dict[int, tuple[RankProgress, float]] = {}
        self._windows, self._suspects = 0, set[int]()

    def look(self, now: float) -> None:
        """Analyse new reports. `now`: seconds of a monotonic clock."""
        if self._starts is None:
            self._starts = self._board.take_all("start")
            if self._starts:
                start_checks.report_start(self._starts, self._report, self._find)
        if self._starts and not self._compared and (seen := self._board.take_all("seen")):
            self._compared = True
            if len(seen) > 1 and self._disjoint:
                start_checks.compare_samples(self._starts, seen, self._report, self._find)
        while self._due and self._starts and (rows := self._board.take_all(f"row/{self._due}")):
            self._participation(self._due, rows, self._starts)
            self._board.drop_all(f"row/{self._due}")
            self._due = next_due(self._due, self._every)
        states = self._states(now)
        if len(states) == self._board.world > 1:
            self._stragglers(states)
            self._missing(states, now)

    @property
    def outstanding(self) -> bool:
        """Whether some ranks have not reported yet, or a rank seems to wait for others."""
        return bool(
            self._awaited("start", self._starts is None)
            or self._awaited("seen", not self._compared)
            or self._awaited(f"row/{self._due}", self._due > 0)
            or self.somebody_waits
        )

    @property
    def somebody_waits(self) -> bool:
        return bool(self._waiting([self._changed[rank][0] for rank in sorted(self._changed)])[0])

    def _awaited(self, key: str, wanted: bool) -> bool:
        return wanted and 0 < len(self._board.missing(key)) < self._board.world

    # Participation

    def _participation(self, step: int, rows: list[StepRow], starts: list[StartReport]) -> None:
        world = self._board.world
        sums = [row["sum"] for row in rows]
        comparable = world > 1 and None not in sums and len({r["structure"] for r in starts}) == 1
        equal = len(set(sums)) == 1
        if comparable and not equal:
            self._find(self._differing(step, sums, starts))
        good = all(
            row["size"] != 0 and (row["loss"] is None or math.isfinite(float(row["loss"])))
            for row in rows
        )
        shown = [
            msg("inspector.step.rank", rank=rank, share=_share(row))
            for rank, row in enumerate(rows[:MANY])
        ]
        if comparable:
            shown.append(
                msg("inspector.step.equal", checksum=sums[0])
                if equal
                else msg("inspector.step.differ")
            )
        text = (
            msg("inspector.step.all_train", step=step, shown=joined(shown))
            if good and world > 1
            else msg("inspector.step.report", step=step, shown=joined(shown))
        )
        self._report(text, step=step, ranks=rows)
        self._board.drop_all(f"sums/{step}")

    def _differing(self, step: int, sums: list[str | None], starts: list[StartReport]) -> Finding:
        common, votes = Counter(sums).most_common(1)[0]
        every = list(range(len(sums)))
        # Without a majority (two ranks) the guilty rank is unknown.
        guilty = (
            [rank for rank in every if sums[rank] != common] if votes > len(sums) / 2 else every
        )
        columns = self._board.take_all(f"sums/{step}") or []
        names = (
            [
                name
                for name, *values in zip(starts[0]["names"], *columns, strict=True)
                if len(set(values)) > 1
            ]
            if columns
            else []
        )
        who = (
            msg("inspector.differ.among", ranks=ranks(guilty))
            if guilty == every
            else msg(
                "inspector.differ.against", ranks=ranks(guilty), others=len(sums) - len(guilty)
            )
        )
        text = msg(
            "inspector.differ.text",
            step=step,
            who=who,
            count=len(names),
            total=len(starts[0]["names"]),
            first=names[0] if names else "?",
        )
        if not starts[0]["wrapped"]:
            text = msg("inspector.differ.not_wrapped", text=text)
        return Finding("parameters_differ", text, None if guilty == every else guilty[0], step)

    # While it trains

    def _states(self, now: float) -> list[RankProgress]:
        states: list[RankProgress | None] = [
            self._board.take(f"state/{rank}") for rank in range(self._board.world)
        ]
        for rank, state in enumerate(states):
            if state and (
                rank not in self._changed or _place(self._changed[rank][0]) != _place(state)
            ):
                self._changed[rank] = (state, now)
            elif state:
                self._changed[rank] = (state, self._changed[rank][1])
        return [state for state in states if state]

    def _stragglers(self, states: list[RankProgress]) -> None:
        windows = min(state["laps"] for state in states) // WINDOW
        known = [times for state in states if (times := state["times"])]
        if windows <= self._windows or len(known) < len(states):
            return
        self._windows, before, self._suspects = windows, self._suspects, set()
        for rank, state in enumerate(states):
            own, data, period = known[rank]
            others = median(other[0] for r, other in enumerate(known) if r != rank)
            if own > self._slow * others and own - others > max(LEAST_MS, COSTS * period):
                self._suspects.add(rank)
                if rank in before:  # twice in a row: not a coincidence
                    text = msg(
                        "inspector.straggler",
                        rank=rank,
                        own=own,
                        data=data,
                        others=others,
                        window=WINDOW,
                    )
                    self._find(Finding("straggler", text, rank, state["step"]))

    def _missing(self, states: list[RankProgress], now: float) -> None:
        waiting, gone = self._waiting(states)
        still = all(now - self._changed[rank][1] >= self.named_s for rank in (*waiting, *gone))
        still |= any(states[rank]["broken"] for rank in waiting)
        if waiting and still:
            step = max(states[rank]["step"] for rank in gone)
            why = states[gone[0]]["ended"]
            text = (
                msg(
                    "inspector.no_data.one_waits",
                    gone=ranks(gone),
                    why=why,
                    step=step,
                    waiting=ranks(waiting),
                    next_step=step + 1,
                )
                if len(waiting) == 1
                else msg(
                    "inspector.no_data.some_wait",
                    gone=ranks(gone),
                    why=why,
                    step=step,
                    waiting=ranks(waiting),
                    next_step=step + 1,
                )
            )
            self._find(Finding("no_data", text, gone[0], step))

    def _waiting(self, states: list[RankProgress]) -> tuple[list[int], list[int]]:
        """(waiting ranks, ranks whose data ended before theirs)."""
        if len(states) < self._board.world:
            return [], []
        ahead = [state["step"] + state["in_step"] for state in states]
        training = [rank for rank, state in enumerate(states) if not state["ended"]]

        def blocks(rank: int) -> bool:
            """Whether it will not join the steps of those before it. One that has ended may still
            evaluate while they wait in the next epoch, but not while they are in the same one."""
            before = [states[other] for other in training if ahead[other] > ahead[rank]]
            same_epoch = any(0 < other["epoch"] <= states[rank]["epoch"] for other in before)
            return bool(before) and (states[rank]["waits"] or same_epoch)

        gone = [rank for rank, state in enumerate(states) if state["ended"] and blocks(rank)]
        least = max((ahead[rank] for rank in gone), default=0)
        return [rank for rank in training if gone and ahead[rank] > least], gone


def _place(state: RankProgress) -> tuple[object, ...]:
    return state["step"], state["in_step"], state["ended"], state["broken"], state["waits"]


def _share(row: StepRow) -> str:
    size = (
        msg("inspector.step.a_batch")
        if row["size"] is None
        else msg("inspector.step.sample", size=1)
        if row["size"] == 1
        else msg("inspector.step.samples", size=row["size"])
    )
    return (
        msg("inspector.step.loss", size=size, loss=float(row["loss"]))
        if row["loss"] is not None
        else size
    )
