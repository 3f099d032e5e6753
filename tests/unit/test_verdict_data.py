"""Verdicts on the data of a Duet run: a damaged file is not a damaged checkpoint, and data that take
long are not only a hang."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from tests.cases import each
from tests.unit.verdicts import failed, finding, new_run, plan, report_error, verdict
from training.core.project import ROOT
from training.core.rundir import RunDir
from training.launcher import failure_report
from training.launcher.outcome import Outcome

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

DAMAGED = [
    ("BadZipFile", "File is not a zip file"),
    ("BadZipFile", "Bad CRC-32 for file 'x.npy'"),
    ("UnpicklingError", "invalid load key, 'v'."),
    ("UnpicklingError", "pickle data was truncated"),
    ("EOFError", "Ran out of input"),
    ("RuntimeError", "PytorchStreamReader failed reading zip archive: failed finding central dir"),
    ("SafetensorError", "Error while deserializing header: HeaderTooLarge"),
]
TASK, OWN = "/home/me/task.py:9", f"{ROOT}/training/tasks/dataset.py:9"
FETCH, START = "step 9: fetch", "building the model"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return new_run(tmp_path)


@each(("kind", "message"), DAMAGED)
@pytest.mark.parametrize(("phase", "where"), [(FETCH, TASK), (FETCH, OWN), (START, TASK)])
def test_a_damaged_data_file_is_not_a_damaged_checkpoint(
    run: RunDir, kind: str, message: str, phase: str, where: str
) -> None:
    report_error(run, 1, kind, message, phase=phase, where=where)
    run.rank_log(1).write_text(
        f'Traceback (most recent call last):\n  File "{where[:-2]}", line 9, in read\n    load(f)\n'
        f"zipfile.{kind}: {message}\n"
    )
    record = failed(run)
    assert verdict(record) == ("exception", "error", 1)
    assert record["advice"][0].startswith(f"a file that is read at {where} is damaged")
    assert not any("checkpoint" in one or "--resume" in one for one in record["advice"])


@pytest.mark.parametrize(("phase", "where"), [(START, OWN), (None, TASK)])
def test_duet_s_own_checkpoint_and_a_script_s_are_checkpoints(
    run: RunDir, phase: str | None, where: str
) -> None:
    report_error(run, 1, *DAMAGED[0], phase=phase, where=where)
    record = failed(run)
    assert verdict(record) == ("checkpoint_corrupt", "error", 1)


@pytest.mark.parametrize("rank", [1, None])
@pytest.mark.parametrize(("where", "slow"), [(TASK, True), (OWN, False)])
def test_the_code_of_a_task_that_takes_long_at_the_start_may_call_alive(
    run: RunDir, rank: int | None, where: str, slow: bool
) -> None:
    waiting = {0: f"{START} at {where} (R.train_data)"}
    found = replace(finding(rank=rank), where=where if rank else None, waiting=waiting)
    advice = "\n".join(failed(run, 0, rank, finding=found, phases={0: START, 1: START})["advice"])
    assert ("self.alive()" in advice, "do not raise" in advice) == (slow, not slow)
    assert "--hang_timeout" in advice and "--resume" not in advice


@pytest.mark.parametrize("workers", [2, 0])
def test_data_on_the_gpu_are_read_without_workers(run: RunDir, workers: int) -> None:
    text = "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you …"
    report_error(run, 1, "RuntimeError", text, phase=FETCH, where=OWN)
    of_run = plan()
    of_run["config"]["num_workers"] = workers
    outcome = Outcome(guilty=(1, 1), here=(1, 1))
    advice = "\n".join(failure_report.failure(outcome, run, cast("Plan", of_run))["advice"])
    assert ("--num_workers=0" in advice, "DataLoader(" in advice) == (bool(workers), not workers)


def test_a_hang_is_resumed_from_a_checkpoint(run: RunDir) -> None:
    (run.checkpoints / "step_00000008").mkdir()
    assert "--resume=" in failed(run, 0, finding=finding())["advice"][-1]
