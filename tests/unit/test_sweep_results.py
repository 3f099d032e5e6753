"""The results of a sweep: titles, the best run, the command that continues it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import each
from tests.unit.test_sweep import TINY, ended, prepared
from training.cli.sweep import __main__ as command
from training.cli.sweep import board, results
from training.cli.sweep.board import Event
from training.cli.sweep.options import SweepOptions
from training.core import rundir
from training.core.messages import msg
from training.core.project import LAUNCH_SCRIPT
from training.core.rundir import RunDir
from training.launcher import report_program
from training.monitor.report import sweep_page
from training.monitor.runs import facts
from training.monitor.runs import sweep as sweep_runs
from training.monitor.runs.sweep import SweepRow
from training.plan import training_plan


def titles(rows: list[SweepRow]) -> list[str]:
    return "".join(text for text, _ in sweep_runs.lines(rows, "TIME")[0]).split()


def test_a_score_is_not_called_a_loss(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sweep = prepared(tmp_path, "--depth=1,2,3")
    sweep.folder.create(sweep.record)
    ended(sweep, 0, "done").event("eval", step=4, val_psnr=27.5)
    ended(sweep, 1, "done", loss_end=2.0)
    ended(sweep, 2, "done").event("eval", step=4, val_rmse=12.3)
    shown, states = board.Board(sweep, ascii_only=True), ["finished"] * 3
    rows = sweep_runs.read(sweep.folder, sweep.record)
    for index, row in enumerate(rows):
        shown.event(Event.STARTED, index, states)
        shown.event(Event.ENDED, index, states, row=row)
    said = "".join(capfd.readouterr())
    for score in ("psnr 27.5000", "loss 2.0000", "rmse 12.3000"):
        assert f", {score}: " in said
    assert msg("monitor.column.evaluation") in titles(rows)
    assert msg("monitor.column.loss") in titles(rows[1:])


@each("state, shown", [("finished", 1), ("stopped", 1), ("running", 0), ("starting", 0)])
def test_a_run_that_is_being_trained_has_no_command(
    state: str,
    shown: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweep = prepared(tmp_path, "--depth=1,2")
    sweep.folder.create(sweep.record)
    name = sweep.record["runs"][1]["name"]
    run = RunDir(tmp_path / name)
    run.create()
    planned = training_plan.make(LAUNCH_SCRIPT, ["1", *TINY, f"--out_dir={tmp_path}"], {})[1]
    rundir.write_json(run.plan, planned)
    run.event("eval", step=4, val_bpb=1.5)
    monkeypatch.setattr(facts, "_state", lambda *args: (state, None, None))
    results.show(sweep.folder, sweep.record, ascii_only=True)
    said = capsys.readouterr().out.splitlines()
    commands = [line for line in said if "--resume=" in line]
    assert len(commands) == shown
    assert any("--num_iterations=" in line for line in commands) == (state == "finished")
    assert (f"--resume={name}" in sweep_page.of(sweep.folder, sweep.record).html()) == bool(shown)


def test_the_page_is_written_by_the_code_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A checkout that was updated during the sweep."""
    sweep = prepared(tmp_path, "--depth=1,2")
    sweep.folder.create(sweep.record)
    results.write_page(sweep.folder, sweep.record)
    assert not sweep.folder.page.exists()  # no run has begun
    run = ended(sweep, 0, "done", loss_end=2.0)
    rundir.append_json(run.metrics, {"time": 1.0, "step": 1, "loss": 2.0})
    results.write_page(sweep.folder, sweep.record)
    assert run.name in sweep.folder.page.read_text()
    assert str(sweep.folder.page) in capfd.readouterr().out
    monkeypatch.setattr(report_program, "ROOT", tmp_path)  # it was removed
    results.write_page(sweep.folder, sweep.record)
    assert "./duet report" in capfd.readouterr().err


def test_a_sweep_reads_its_messages_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, seen = prepared(tmp_path, "--depth=1,2"), list[str]()
    monkeypatch.setattr(command.messages, "load_all", lambda: seen.append("messages"))
    monkeypatch.setattr(command, "_run", lambda *args: seen.append("run") or 0)
    command._train(sweep, SweepOptions())
    assert seen == ["messages", "run"]


@each("data, best", [("a", 1), ("b", 0)])
def test_scores_on_different_data_have_no_best(
    data: str, best: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = prepared(tmp_path, "--depth=1,2")
    sweep.folder.create(sweep.record)
    for index, (name, score) in enumerate((("a", 2.0), (data, 1.0))):
        run = ended(sweep, index, "done")
        run.event("eval", step=4, val_bpb=score)
        plan = rundir.read_json(run.plan) or {}
        rundir.write_json(run.plan, plan | {"data": {"name": name, "files": 1, "bytes": 9}})
    rows = sweep_runs.ranked(sweep_runs.read(sweep.folder, sweep.record))
    assert [row.loss for row in rows] == [1.0, 2.0]
    assert (sweep_runs.best(rows) is not None) == bool(best)
    results.show(sweep.folder, sweep.record, ascii_only=True)
    other = msg("monitor.sweep.other_data")
    assert (other in capsys.readouterr().out) != bool(best)
    html = sweep_page.of(sweep.folder, sweep.record).html()
    assert (html.count('class="n best"'), other in html) == (best, not best)


TEST = {"dataroot_gt": "a", "test_dataroot_gt": "t", "test_num_frame": -1}


@each(
    "other, evaluated, best",
    [
        ({"dataroot_gt": "b"}, 2, True),
        ({"dataroot_gt": "b"}, 0, False),
        ({"test_dataroot_gt": "u"}, 2, False),
        ({"test_dataroot_gt": "u"}, 0, True),
        ({"test_num_frame": 10}, 2, False),
        ({}, 1, True),
    ],
)
def test_scores_of_the_same_validation_data_have_a_best(
    other: dict[str, object], evaluated: int, best: bool, tmp_path: Path
) -> None:
    """A training loss is one of the training data."""
    sweep = prepared(tmp_path, "--depth=1,2")
    sweep.folder.create(sweep.record)
    for index, options in enumerate((TEST, TEST | other)):
        run = ended(sweep, index, "done", loss_end=2.0)
        if index < evaluated:
            run.event("eval", step=4, val_psnr=27.5)
        plan = rundir.read_json(run.plan) or {}
        rundir.write_json(run.plan, plan | {"task": {"name": "clips", "options": options}})
    rows = sweep_runs.read(sweep.folder, sweep.record)
    assert (sweep_runs.best(rows) is not None) == best
    assert sweep_runs.mixed_data(rows) != best
