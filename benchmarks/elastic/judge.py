"""Did the training continue with the same samples, and how long did that take?"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.elastic.programs import STEPS, Record
from benchmarks.losses import ROUNDING
from training.core.units import plural


def judge(
    records: Sequence[Record], whole: Mapping[int, Record], losses: Sequence[float], back: int
) -> dict[str, Any]:
    """`records`: of all machines, in the order of time; `whole`: of the untouched run, by step;
    `losses`: their times; `back`: how many machines came back."""
    own = {one["step"]: one for one in records}  # of a repeated step, the last
    ranks = next(iter(whole.values()))["ranks"]
    changed = next((n for n, one in enumerate(records) if one["ranks"] != ranks), len(records))
    return {
        "steps": max(own, default=0),
        "complete": own.keys() == whole.keys(),
        "pauses_s": [
            pause(records, since, until)
            for since, until in itertools.pairwise([*losses, float("inf")])
        ],
        "growths_s": growths(records),
        "world_sizes": [next(group)["ranks"] for _, group in itertools.groupby(records, _ranks)],
        "repeated": repeated(records),
        "same_bits": all(o["loss"] == whole[o["step"]]["loss"] for o in records[:changed]),
        "same_samples": all(
            one.get("samples") == whole[one["step"]].get("samples") for one in records
        ),
        "differs": max((abs(o["loss"] / whole[o["step"]]["loss"] - 1) for o in records), default=0),
        "two_runs": returns(records) > back or rewinds(records) > 2 * (len(losses) + back),
    }


def _ranks(record: Record) -> int:
    return int(record["ranks"])


def pause(records: Sequence[Record], since: float, until: float) -> float | None:
    """Seconds without a new step after a loss. None: no step followed."""
    gaps = [
        after["time"] - max(before["time"], since)
        for before, after in itertools.pairwise(records)
        if since < after["time"] <= until and not _grown(before, after)
    ]
    return round(max(gaps), 2) if gaps else None


def _grown(before: Record, after: Record) -> bool:
    """More ranks: this gap is not due to a loss."""
    return int(after["ranks"]) > int(before["ranks"])


def growths(records: Sequence[Record]) -> list[float]:
    """Seconds without a step when machines are taken back."""
    pairs = itertools.pairwise(records)
    return [round(b["time"] - a["time"], 2) for a, b in pairs if _grown(a, b)]


def repeated(records: Sequence[Record]) -> int:
    done, count = set[int](), 0
    for one in records:
        count += one["step"] in done
        done.add(one["step"])
    return count


def returns(records: Sequence[Record]) -> int:
    """How often a writer wrote again after another one had: it did not know that it was
    replaced, unless it came back."""
    turns = [writer for writer, _ in itertools.groupby(one["writer"] for one in records)]
    return len(turns) - len(set(turns))


def rewinds(records: Sequence[Record]) -> int:
    """How often training went back: once for a restart, and with every other step where two runs
    write into the same file."""
    return sum(b["step"] <= a["step"] for a, b in itertools.pairwise(records))


def problems(found: Mapping[str, Any], *, may_end: bool = False, exact: bool = True) -> list[str]:
    """What must not happen in any run. `exact`: losses have the same bits with as many ranks."""
    wrong = []
    if not found["pauses_s"]:
        wrong.append("the run ended before anything was lost")
    if not found["finished"]:
        if not may_end:
            wrong.append(f"ended at step {found['steps']} of {STEPS}: exit {found['exits']}")
    elif not found["complete"]:
        wrong.append("not the steps of the untouched run")
    if exact and not found["same_bits"]:
        wrong.append("other losses than the untouched run, with as many ranks")
    if not found["same_samples"]:
        wrong.append("other samples than the untouched run")
    if found["differs"] > ROUNDING:
        wrong.append(f"losses differ by {found['differs']:.1e}")
    if found["two_runs"]:
        wrong.append("two machines trained at the same time")
    if found["left"]:
        wrong.append(f"{plural(len(found['left']), 'process', 'processes')} left")
    return wrong
