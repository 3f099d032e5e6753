"""The run that a console log given to `./duet diagnose` is of."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.unit.diagnosed import OOM, START_S, names, new_run, plan
from training.cli import diagnose as command
from training.core import find_run, project
from training.core.rundir import RunDir, write_json
from training.diagnose import result


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(find_run, "WORK", tmp_path)  # the run is in its experiments/
    monkeypatch.setattr(project, "WORK", tmp_path)
    return new_run(tmp_path, created=START_S)


def test_a_console_log_leads_to_its_run(run: RunDir, tmp_path: Path) -> None:
    console = tmp_path / "redirected.log"
    console.write_text(f"{names(run)}{OOM}")
    assert (
        "./launch_train.sh 2 --resume=run --device_batch_size=4"
        in result.diagnose([console])["advice"]
    )


def test_the_console_log_of_another_start_has_its_own_verdict(run: RunDir, tmp_path: Path) -> None:
    """The run has been resumed and has finished."""
    write_json(run.plan, plan(created=START_S, log_file="/logs/launch_train_2.log"))
    write_json(run.summary, {"status": "finished", "exit_code": 0, "time": START_S + 99})

    def cause(name: str, at: float) -> str:
        console = tmp_path / name
        console.write_text(f"{names(run, at)}{OOM}")
        return result.diagnose([console])["cause"]

    assert cause("launch_train_1.log", START_S - 60) == "gpu_oom"
    assert cause("launch_train_2.log", START_S - 9999) == "none"  # copied to another time zone
    assert cause("tee.log", START_S + 2) == "none"
    assert cause("of another machine.log", START_S + 999) == "gpu_oom"


def test_several_runs_in_a_console_log(run: RunDir, tmp_path: Path) -> None:
    """The last one counts, also if its folder is gone."""
    write_json(run.summary, {"status": "finished", "exit_code": 0, "time": START_S + 99})
    last = new_run(tmp_path, "last", created=START_S + 100)
    write_json(last.summary, {"status": "stopped", "exit_code": 75, "time": START_S + 200})
    console = tmp_path / "night.log"
    steps = "".join(f"step {n}/9999 loss 2.0\n" for n in range(9999))
    console.write_text(f"{names(run)}{steps}{names(last, START_S + 101)}step 1/9 loss 2.0\n{OOM}")
    assert result.diagnose([console])["cause"] == "preempted"
    shutil.rmtree(last.path)
    assert result.diagnose([console])["cause"] == "gpu_oom"


def test_a_copy_of_a_console_log_leads_to_a_run_that_was_moved(run: RunDir, tmp_path: Path) -> None:
    console = tmp_path / "redirected.log"
    console.write_text(f"{names(RunDir(Path('/elsewhere/run')))}{OOM}")
    assert result.diagnose([console])["run"] == str(run.path)


def test_a_folder_of_console_logs_is_not_one_run(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    older, newer = logs / "launch_train_1.log", logs / "launch train 2.log"
    newer.write_text(f"{names(run)}step 1/9 loss 2.0\n")
    older.write_text(f"{names(run)}{OOM}")  # of the same run, as on another machine
    assert result.diagnose([logs])["cause"] == "gpu_oom"
    older.write_text(f"{names(RunDir(Path('/gone/other')))}{OOM}")
    os.utime(older, (START_S, START_S))
    assert command.main([str(logs)]) == 2
    told = capsys.readouterr().err
    assert f"{logs} contains 2 runs" in told and f"./duet diagnose '{newer}'" in told
