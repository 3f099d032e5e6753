"""Output of an inspection: lines on standard error of rank 0, and events in the run directory, if
there is one."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .messages import msg

# A module inserted by lib/run_script.py: `ranks`, a folder of the run; `keep(error)` stores an
# error for the failure card.
LAUNCHED = "duet_launched"
RUN_DIR = "DUET_RUN_DIR"
MANY = 16  # maximum number of ranks shown


@dataclass(frozen=True)
class Finding:
    """`rank`: the guilty one; None if unknown."""

    kind: str
    text: str
    rank: int | None = None
    step: int | None = None


class InspectionError(RuntimeError):
    """A finding that ends the training. `guilty_rank`: None if unknown."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.text)
        self.kind, self.guilty_rank, self.step = finding.kind, finding.rank, finding.step


class FindingsOutput:
    """Writer to standard error and events.jsonl. A write error of the file is reported once and not
    raised."""

    def __init__(self) -> None:
        self._launched = sys.modules.get(LAUNCHED)
        folder = Path(self._launched.ranks).parent if self._launched else os.environ.get(RUN_DIR)
        # as in training/core/rundir.py
        self._events = Path(folder, "events.jsonl") if folder and Path(folder).is_dir() else None

    def line(self, text: str) -> None:
        # The terminal is gone or standard error is closed: training continues.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"[inspector] {text}\n")
            sys.stderr.flush()

    def say(self, text: str, **facts: Any) -> None:
        self.line(text)
        self._event("inspection", text=text, **facts)

    def warn(self, found: Finding) -> None:
        self.line(msg("inspector.warning", text=found.text))

    def record(self, found: Finding) -> None:
        self._event(
            "warning",
            code="warning.inspector",
            text=found.text,
            rank=found.rank,
            step=found.step,
            kind=found.kind,
            by="inspector",
        )

    def keep(self, error: InspectionError) -> None:
        """Store an error for the launcher's failure card, if this process ends without raising."""
        if self._launched:
            self._launched.keep(error)

    def _event(self, event: str, **facts: Any) -> None:
        if self._events is None:
            return
        line = json.dumps({"time": time.time(), "event": event, **facts}, ensure_ascii=False) + "\n"
        try:
            handle = os.open(self._events, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(handle, line.encode("utf-8", "backslashreplace"))
            finally:
                os.close(handle)
        except OSError as error:
            self.line(msg("inspector.unwritable", file=self._events, error=error.strerror))
            self._events = None


def ranks(numbers: Sequence[int]) -> str:
    """'rank 3', 'ranks 0, 1'."""
    some = ", ".join(map(str, numbers[:MANY]))
    if len(numbers) > MANY:
        some = msg("inspector.ranks_more", some=some, total=len(numbers))
    return (
        msg("inspector.ranks", some=some) if len(numbers) > 1 else msg("inspector.rank", some=some)
    )


def joined(parts: Iterable[str]) -> str:
    return msg("inspector.separator").join(parts)


def listed(indices: Sequence[int], limit: int) -> str:
    return ", ".join(map(str, indices[:limit])) + (", …" if len(indices) > limit else "")
