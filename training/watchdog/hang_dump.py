"""Record of a finding: hangs/<time>/ in the run directory with the evidence of every rank, and an
event."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from training.core import log, rundir
from training.core.messages import msg
from training.watchdog.hang_report import HangFinding

if TYPE_CHECKING:
    from training.core.contracts.verdict import VerdictRecord


def keep(run: rundir.RunDir, found: HangFinding, texts: Mapping[int, str]) -> HangFinding:
    """`texts`: rank → evidence. A full disk is a warning; the finding is returned all the same."""
    facts = _facts(found)
    found = _written(run, found, facts, texts)
    run.event("verdict", **facts, folder=str(found.folder))
    return found


def keep_stacks(
    run: rundir.RunDir, found: HangFinding, texts: Mapping[int, str] | None = None
) -> HangFinding:
    """Without an event: something else has ended the run."""
    return _written(run, found, _facts(found), found.texts() if texts is None else texts)


def _facts(found: HangFinding) -> VerdictRecord:
    return {
        "kind": found.kind,
        "rank": found.rank,
        "where": found.where,
        "phase": found.phase,
        "text": found.sentence(),
        "since_s": found.since_s,
        "waiting": {str(rank): place for rank, place in found.waiting.items()},
    }


def _written(
    run: rundir.RunDir, found: HangFinding, facts: VerdictRecord, texts: Mapping[int, str]
) -> HangFinding:
    folder = run.hangs / time.strftime("%Y%m%d_%H%M%S")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank, text in texts.items():
            (folder / f"rank{rank}.txt").write_text(text, encoding="utf-8")
        rundir.write_json(folder / "verdict.json", facts)
    except OSError as error:
        log.warning(msg("watchdog.dump.unwritable", folder=folder, strerror=error.strerror))
    return replace(found, folder=str(folder))
