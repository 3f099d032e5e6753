"""The last step that each rank of a script has printed: for ranks that do not make the same
steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from training.core import rundir
from training.core.messages import msg
from training.core.tail import tail
from training.diagnose.log_parsers import line_parser

LINES = 200  # from the end of a log


def shown(run: rundir.RunDir, since: Mapping[Path, int]) -> str:
    """'' where no rank prints its steps, and under torchrun, which has one log for all of them.
    `since`: log → offset of this attempt."""
    steps = {
        int(log.stem[4:]): step
        for log in run.ranks.glob("rank*.log")
        if log.stem[4:].isdecimal() and (step := _last(log, since.get(log, 0))) is not None
    }
    if not steps:
        return ""
    each = (msg("watchdog.printed.rank", rank=r, step=s) for r, s in sorted(steps.items()))
    return msg("watchdog.printed.steps", steps=", ".join(each))


def _last(log: Path, since: int) -> int | None:
    for line in reversed(tail(log, LINES, since)):
        fact = line_parser.parse(line, 0)
        if fact and fact.step is not None and not fact.validates:
            return fact.step
    return None
