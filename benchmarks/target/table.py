"""Tables of the complete trainings, for the terminal and docs/performance.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.target import turns
from benchmarks.target.plan import CPU, DUET, Losses, Pair, Plan, Training, pairs
from benchmarks.target.runs import UNKNOWN, Kept, Record, finals, label, nanochats, shown

NONE = "No training of this comparison is complete yet."
STALE = "The time of a step is of another version of nanochat: measure it again with --timing."


def lines(folder: Path, plan: Plan) -> list[str]:
    """Markdown: which run of Duet reaches the baseline's loss, all trainings, the time of a
    step."""
    found = {t: record for t, record in Kept(folder).trainings().items() if plan.includes(t)}
    losses = finals(found)
    time = turns.kept(folder, plan)
    stale = bool(time and nanochats(found) - {time[0].get("nanochat", UNKNOWN)})
    ratio = _ratio(time[1]) if time and not stale else None
    complete = pairs(plan, losses)
    out = [*_pairs(complete, losses, ratio), "", *trainings(found)] if found else [NONE]
    return [*out, "", STALE if stale else _time(*time, plan.device)] if time else out


def _pairs(complete: Sequence[Pair], losses: Losses, ratio: float | None) -> Iterator[str]:
    yield "| baseline | steps | seed | bits per byte | Duet | steps | of steps | of seconds |"
    yield "|" + "---|" * 8
    for pair in complete:
        base, own = pair.base, pair.duet
        row = [label(base), str(base.steps), str(base.seed), shown(losses[base], 3)]
        if own is None:
            row += ["not reached", "", "", ""]
        else:
            share = own.steps / base.steps
            seconds = "" if ratio is None else f"**{share * ratio:.2f}**"
            row += [shown(losses[own], 3), str(own.steps), f"{share:.2f}", seconds]
        yield f"| {' | '.join(row)} |"


def trainings(found: Mapping[Training, Record]) -> list[str]:
    """Markdown: a row for each kind of training, with its losses by precision and seed; the
    commits."""
    losses = finals(found)
    columns = sorted({(one.precision, one.seed) for one in losses})
    several = len({precision for precision, _ in columns}) > 1
    names = [f"{precision}, " * several + f"seed {seed}" for precision, seed in columns]
    out = [f"| training | steps | {' | '.join(names)} |", "|" + "---|" * (2 + len(columns))]
    kinds = {(t.steps, t.contender, t.rate): t for t in losses}
    for (steps, _, _), one in sorted(kinds.items()):
        row = [losses.get(replace(one, precision=name, seed=seed)) for name, seed in columns]
        cells = ["" if loss is None else shown(loss, 3) for loss in row]
        out.append(f"| {label(one)} | {steps} | {' | '.join(cells)} |")
    return [*out, "", _commits(found)]


def _commits(found: Mapping[Training, Record]) -> str:
    own = {record["commit"] for one, record in found.items() if one.contender == DUET}
    listed = (
        f"{name} {', '.join(f'`{one}`' for one in sorted(commits))}"
        for name, commits in (("Duet", own), ("nanochat", nanochats(found)))
        if commits
    )
    return f"Commits: {'; '.join(listed)}."


def _ratio(rounds: Sequence[Sequence[float]]) -> float:
    """All rounds together: a single one has few steps."""
    base, own = map(sum, zip(*rounds, strict=True))
    return own / base


def _time(record: dict[str, Any], rounds: Sequence[Sequence[float]], device: str) -> str:
    base, own = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratios = [_ratio([one]) for one in rounds]
    about = record["machine"]
    of, digits = (" of processor time", 0) if device == CPU else ("", 1)
    machine = f"{about['cpu']}, {about['cores']} cores" if device == CPU else about["gpu"]
    return (
        f"A step takes {own:.{digits}f} ms{of} in Duet and {base:.{digits}f} ms in the baseline "
        f"(medians). All {len(rounds)} rounds together: {_ratio(rounds):.3f} × the baseline, "
        f"single rounds {min(ratios):.2f} to {max(ratios):.2f} ({machine}, torch {about['torch']}, "
        f"commit `{record['commit']}`)."
    )
