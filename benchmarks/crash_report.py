"""Result table of the crash benchmark."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.crash_moments import REMOVING, WRITING

WEIGHTS, LOST, RESUME = (
    "wrong weights or checkpoints",
    "more steps lost than since the checkpoint",
    "not resumable",
)
END, SURVIVORS, TRACE = (
    "different weights, losses or summary at the end",
    "processes left after 8 s",
    "tracebacks of launcher or supervisor",
)


@dataclass
class Tally:
    """Counts over all kills."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)  # (victim, phase that was hit)
    aimed: Counter[str] = field(default_factory=Counter)  # by phase
    halves: int = 0  # kills that left a partial checkpoint
    starts: int = 0
    restarts: int = 0  # by the supervisor itself
    lost: list[int] = field(default_factory=list)  # steps
    gone_s: list[float] = field(default_factory=list)
    wrong: Counter[str] = field(default_factory=Counter)  # by kind


def report(tally: Tally, runs: int, seconds: float) -> str:
    victims = sorted({victim for victim, _ in tally.kills})
    phases = Counter[str]()
    for (_, phase), count in tally.kills.items():
        phases[phase] += count
    wide = max(map(len, phases))
    lines = [_row("killed in", "", victims, wide)]
    lines += [
        _row(phase, count, [tally.kills[victim, phase] or "·" for victim in victims], wide)
        for phase, count in phases.most_common()
    ]
    lines.append(
        _row(
            "all",
            phases.total(),
            [sum(n for (v, _), n in tally.kills.items() if v == victim) for victim in victims],
            wide,
        )
    )
    lost, gone = tally.lost or [0], tally.gone_s or [0.0]
    facts = {
        "kills": f"{phases.total()} in {runs} runs, {seconds:.0f} s",
        "checkpoints": f"{tally.aimed[WRITING]} kills aimed at writing, {tally.aimed[REMOVING]} at "
        f"removing; {tally.halves} left a partial one",
        "continued": f"{tally.starts - runs} resumed by command, {tally.restarts} restarted by the "
        f"supervisor",
        "steps lost": f"median {statistics.median(lost):g}, at most {max(lost)}",
        "all gone after": f"median {statistics.median(gone):.2f} s, at most {max(gone):.2f} s",
    } | {kind: str(tally.wrong[kind]) for kind in (WEIGHTS, LOST, RESUME, END, SURVIVORS, TRACE)}
    wide = max(map(len, facts))
    return "\n".join([*lines, "", *(f"{name:<{wide}}  {value}" for name, value in facts.items())])


def _row(name: str, count: object, cells: Sequence[object], wide: int) -> str:
    return f"{name:<{wide}}  {count!s:>5} " + "".join(f"{cell!s:>12}" for cell in cells)
