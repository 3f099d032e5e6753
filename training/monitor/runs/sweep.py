"""The runs of a sweep: facts of each, order by loss, table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from training.core import metric_units, standing, units
from training.core.cells import cells, pad
from training.core.errors import UserError
from training.core.jsonl import whole
from training.core.messages import msg
from training.core.next_command import next_command
from training.core.rundir import RunDir
from training.core.sweep_dir import SweepDir
from training.monitor import term_text
from training.monitor.run_status import FAILED, FINISHED
from training.monitor.runs import facts, table
from training.monitor.runs.facts import RunFacts
from training.monitor.term_text import Line
from training.plan import finished

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.run_files import SweepRecord

WAITING: Final = "waiting"  # not started yet
LONGEST_VALUE = 24


@dataclass
class SweepRow:
    """One run. `found`: None before its first start; `seconds`: its time, or what is left."""

    name: str
    values: FieldValues
    state: str
    found: RunFacts | None = None
    step: int | None = None
    total: int | None = None
    loss: float | None = None
    loss_name: str | None = None  # as of RunFacts
    speed: float | None = None
    seconds: float | None = None

    @property
    def starred(self) -> bool:
        """Whether the loss is one of the training: there is no evaluation."""
        return self.loss_name == "loss" and self.loss is not None

    @property
    def score(self) -> str:
        """The loss in words: 'loss 2.0312', 'bpb 0.9876', 'psnr 27.1250'."""
        name = term_text.clean((self.loss_name or "loss").removeprefix(metric_units.EVALUATION))
        return f"{name} {units.unknown() if self.loss is None else units.decimal(self.loss)}"

    @property
    def title(self) -> str:
        """The fields in which it differs."""
        return " ".join(f"{name}={table.shown(value)}" for name, value in self.values.items())


def read(folder: SweepDir, record: SweepRecord) -> list[SweepRow]:
    """All runs as they are on disk, in the order of the record."""
    return [row(folder, run["name"], run["values"]) for run in record["runs"]]


def row(folder: SweepDir, name: str, values: FieldValues) -> SweepRow:
    path = folder.experiments / name
    if not path.is_dir():
        return SweepRow(name, values, WAITING)
    found = facts.read(path)
    return SweepRow(
        name,
        values,
        found.state,
        found,
        step=found.step,
        loss=found.loss,
        loss_name=found.loss_name,
        speed=found.speed,
        seconds=found.seconds,
    )


def ranked(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """The best first: evaluations before training losses, runs without a loss last."""

    def key(one: SweepRow) -> tuple[bool, bool, bool, float]:
        if one.loss is None or not math.isfinite(one.loss):
            return True, True, True, 0.0
        value = metric_units.rank_of(one.loss_name or "", one.loss)
        return False, one.starred, one.state == FAILED, value

    return sorted(rows, key=key)


def best(rows: Sequence[SweepRow]) -> SweepRow | None:
    """The run with the best loss; None: no run has one, or they cannot be compared."""
    first = next(iter(ranked(rows)), None)
    if first is None or first.loss is None or not math.isfinite(first.loss) or mixed_data(rows):
        return None
    return first


def mixed_data(rows: Sequence[SweepRow]) -> bool:
    """Whether the losses are those of different data. Evaluations come before training losses,
    which may be of other data than they are."""
    known = [row for row in rows if row.loss is not None]
    deciding = [row for row in known if not row.starred] or known
    return len({row.found.data for row in deciding if row.found}) > 1


def longer(folder: SweepDir, best: SweepRow) -> str:
    """The command that trains the best run for twice as long, or continues it; '' while it
    trains."""
    if best.state in facts.LIVE:
        return ""
    run = RunDir(folder.experiments / best.name)
    try:
        plan = standing.read_plan(run)
        if plan is None:
            return ""
        steps = whole(best.step) or 0
        changes = finished.longer(plan["config"], steps) if best.state == FINISHED else {}
        return next_command(plan, run, **changes)
    except (KeyError, TypeError, AttributeError, ValueError, UserError):
        # an incomplete plan, or one of a later version
        return ""


def word(state: str) -> str:
    return msg("monitor.sweep.waiting") if state == WAITING else facts.word(state)


def lines(rows: Sequence[SweepRow], last: str, width: int | None = None) -> list[Line]:
    """A row for each run below a heading: the fields in which the runs differ, then the figures.
    `last`: title of the last column; `width`: cells of the terminal, None: nothing is cut."""
    names = list(dict.fromkeys(name for one in rows for name in one.values))
    titles = [
        *(name.upper() for name in names),
        msg("monitor.column.state"),
        msg("monitor.column.step"),
        table.loss_title(one.loss_name for one in rows),
        msg("monitor.column.speed"),
        last,
    ]
    texts = [[*(_value(one, name) for name in names), *_figures(one)] for one in rows]
    widths = [max(map(cells, column)) for column in zip(titles, *texts, strict=True)]
    while width is not None and names and sum(widths) + 2 * len(widths) - 2 > width:
        widest = max(range(len(names)), key=lambda at: widths[at])
        if widths[widest] <= 4:
            break
        widths[widest] -= 1
    left = len(names) + 1  # columns of text
    out: list[Line] = [[(_joined(titles, widths, left), "dim")]]
    for one, text in zip(rows, texts, strict=True):
        before = _joined(text[: left - 1], widths[: left - 1], left)
        state = pad(text[left - 1], widths[left - 1])
        after = _joined(text[left:], widths[left:], 0)
        badge = "dim" if one.state == WAITING else table.BADGES.get(one.state, "")
        out.append([(f"{before}  " if names else "", ""), (state, badge), (f"  {after}", "")])
    return out


def _value(one: SweepRow, name: str) -> str:
    value = table.shown(one.values[name]) if name in one.values else "-"
    return term_text.cut_middle(term_text.clean(value), LONGEST_VALUE)


def _figures(one: SweepRow) -> list[str]:
    step = "-" if one.step is None else f"{one.step:,}"
    return [
        word(one.state),
        f"{step}/{one.total:,}" if one.total and one.step is not None else step,
        f"{units.decimal(one.loss)}{'*' if one.starred else ' '}",
        units.count(one.speed),
        units.duration(one.seconds),
    ]


def _joined(texts: Sequence[str], widths: Sequence[int], left: int) -> str:
    """`left`: how many columns are at the left edge of their cells."""
    return "  ".join(
        pad(term_text.cut_middle(text, width), width, right=at >= left)
        for at, (text, width) in enumerate(zip(texts, widths, strict=True))
    )
