"""Markdown of the kept cases."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.elastic.drill import LIMIT_S
from benchmarks.elastic.machine import TITLES
from benchmarks.elastic.programs import PROGRAMS
from training.core.rundir import read_records

RESULT = Path(__file__).resolve().parents[1] / "results/elastic.jsonl"
Line = Mapping[str, Any]


def kept() -> list[Line]:
    return list(read_records(RESULT))


def lines(found: Sequence[Line]) -> list[str]:
    return [*single(found), "", *drawn(found)]


def single(found: Sequence[Line]) -> list[str]:
    return list(_singles([line for line in found if line["place"]]))


def drawn(found: Sequence[Line]) -> list[str]:
    return list(_randoms([line for line in found if not line["place"]]))


def _load(found: Sequence[Line]) -> str:
    loads = [line["load"] for line in found]
    usual, starts = _start_s(found)
    return (
        f"Load average {statistics.median(loads):.0f} ({min(loads):.0f}–{max(loads):.0f}) on "
        f"{max(line['cores'] for line in found)} cores. The start of the ranks takes most of the "
        f"time: the first one of a run, up to its first step, took {usual:.0f} s "
        f"({min(starts):.0f}–{max(starts):.0f})."
    )


def _start_s(found: Sequence[Line]) -> tuple[float, Sequence[float]]:
    """The median of the starts, and all."""
    starts = [line["start_s"] for line in found if line.get("start_s")] or [0.0]
    return statistics.median(starts), starts


def _conditions(found: Sequence[Line]) -> str:
    """Load and start in the cases of one program."""
    if not found:
        return "–"
    load = statistics.median(line["load"] for line in found)
    return f"load {load:.0f}, start {_start_s(found)[0]:.0f} s"


def _singles(found: Sequence[Line]) -> Iterator[str]:
    if not found:
        return
    titles = [program.title for program in PROGRAMS.values()]
    yield f"| machines | which | loss | {' | '.join(titles)} |"
    yield "|---|---|---|" + "---|" * len(titles)
    cells = {(o["machines"], o["ranks"], o["place"], kind(o), o["program"]): o for o in found}
    for key in dict.fromkeys(key[:-1] for key in cells):
        machines, ranks, place, what = key
        shape = f"{machines}" if ranks == 1 else f"{machines}, {ranks} ranks"
        row = [cell(cells.get((*key, program))) for program in PROGRAMS]
        where = "–" if machines == 1 else "the first" if place == "first" else "another"
        yield f"| {shape} | {where} | {TITLES[what]} | {' | '.join(row)} |"
    for machines in dict.fromkeys(line["machines"] for line in found):
        here = [line for line in found if line["machines"] == machines]
        of = [[line for line in here if line["program"] == program] for program in PROGRAMS]
        conditions = " | ".join(map(_conditions, of))
        yield f"| {machines} | | median load average, and first start of the ranks | {conditions} |"
    yield ""
    yield _load(found)


def kind(line: Line) -> str:
    return str(line["losses"][0]["kind"])


def cell(line: Line | None) -> str:
    """Time from the loss to the first new step, and what was not as it should be."""
    if line is None:
        return "–"
    if line["finished"]:
        text = f"{line['pauses_s'][0]:.1f} s"
        text += f", {line['repeated']} steps repeated" if line["repeated"] else ""
    elif line["gave_up"] and line["complete"] and (pause := line["pauses_s"][0]) is not None:
        text = f"{pause:.1f} s, but the launchers do not end"
    elif line["gave_up"]:
        text = f"> {LIMIT_S:.0f} s"
    else:
        codes = sorted({code for code in line["exits"] if code is not None and code >= 0})
        text = f"ends after {line['ended_s']:.0f} s, exit {', '.join(map(str, codes))}"
    wrong = [problem for problem in line["problems"] if not problem.startswith("ended")]
    return "; ".join([text, *wrong])


def _spread(title: str, seconds: Sequence[float]) -> str:
    most = f"{statistics.median(seconds):.1f} s ({min(seconds):.1f}–{max(seconds):.1f})"
    return f"| {title} | {len(seconds)} | {most} |"


def _randoms(found: Sequence[Line]) -> Iterator[str]:
    if not found:
        yield "Not measured yet."
        return
    yield "| loss | number | from the loss to the first new step: median (range) |"
    yield "|---|---|---|"
    for what, title in TITLES.items():
        seconds = [
            pause
            for line in found
            for loss, pause in zip(line["losses"], line["pauses_s"], strict=False)
            if loss["kind"] == what and pause is not None
        ]
        if seconds:
            yield _spread(title, seconds)
    if grown := [seconds for line in found for seconds in line["growths_s"]]:
        yield _spread("a machine is taken back, from the last step to the next", grown)
    wrong = [line for line in found if line["problems"]]
    worst = max(line["differs"] for line in found)
    yield ""
    yield (
        f"Runs: {len(found)}, with {sum(len(one['pauses_s']) for one in found)} losses; without "
        f"problems: {len(found) - len(wrong)}. Largest relative difference of a training loss: "
        f"{worst:.1e}. {_load(found)}"
    )
    for line in wrong:
        yield f"- `{line['name']}`: {'; '.join(line['problems'])}"
