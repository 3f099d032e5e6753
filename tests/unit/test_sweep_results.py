"""What a sweep says about its runs: titles, the best one, what to do next."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.test_sweep import ended, prepared
from training.cli.sweep import board
from training.cli.sweep.board import Event
from training.core.messages import msg
from training.monitor.runs import sweep as sweep_runs
from training.monitor.runs.sweep import SweepRow


def titles(rows: list[SweepRow]) -> list[str]:
    return "".join(text for text, _ in sweep_runs.lines(rows, "TIME")[0]).split()


def test_a_score_is_not_called_a_loss(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sweep = prepared(tmp_path, "--depth=1,2")
    sweep.folder.create(sweep.record)
    ended(sweep, 0, "done").event("eval", step=4, val_psnr=27.5)
    ended(sweep, 1, "done", loss_end=2.0)
    shown, states = board.Board(sweep, ascii_only=True), ["finished", "finished"]
    rows = sweep_runs.read(sweep.folder, sweep.record)
    for index, row in enumerate(rows):
        shown.event(Event.STARTED, index, states)
        shown.event(Event.ENDED, index, states, row=row)
    said = "".join(capfd.readouterr())
    assert ", psnr 27.5000: " in said and ", loss 2.0000: " in said
    assert msg("monitor.column.evaluation") in titles(rows)
    assert msg("monitor.column.loss") in titles(rows[1:])
