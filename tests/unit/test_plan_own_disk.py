"""What a start leaves on a machine that does not coordinate the run and has a disk of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.conftest import ENHANCED, only
from tests.unit.test_plan import make
from training.core.errors import UserError
from training.core.rundir import RunDir, read_json, write_json
from training.plan import writer

NAME, TOKEN = "mine", "token"
Start = Callable[..., RunDir]


@pytest.fixture
def start(home: Path, tmp_path: Path) -> Start:
    """The second of two machines, up to its plan."""
    place = ["--nnodes=2", "--node_rank=1", "--master_addr=127.0.0.1", f"--run_name={NAME}"]
    folders = [f"--out_dir={tmp_path}/runs", f"--log_dir={tmp_path}/logs"]

    def go(launch: str = "first", *, resumes: bool = False) -> RunDir:
        asked, plan, checks = make(
            "--device=cpu",
            "--depth=1",
            "--total_batch_size=49152",
            *place,
            *folders,
            script=ENHANCED,
        )
        plan["resume"] = resumes
        writer.write(plan, checks, asked, lambda *_: (NAME, launch, TOKEN), os.getpid())
        return RunDir(tmp_path / "runs" / NAME, 1)

    return go


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def prepared(run: RunDir) -> None:
    """As before the ranks start."""
    write_json(run.data, {"of": "this start"})
    write_json(run.supervisor, {"pid": 1})
    run.tokenizer.mkdir(exist_ok=True)
    (run.tokenizer / "tokenizer.json").touch()
    (run.received / "checkpoints").mkdir(parents=True)


def test_a_new_run_that_is_withdrawn_leaves_nothing(start: Start) -> None:
    run = start()
    prepared(run)
    writer.withdraw(run)
    assert not run.path.exists() and run.path.parent.exists()


@pytest.mark.parametrize(
    ("launch", "resumes"), [("first", False), ("second", True)], ids=["rejoined", "resumed"]
)
def test_a_withdrawn_start_leaves_an_earlier_one_as_it_was(
    start: Start, launch: str, resumes: bool
) -> None:
    run = start()
    aside = run.replaced / "20241021_160000_x" / "checkpoints" / "step_00000050"
    for folder in (aside, run.checkpoints / "step_00000010"):
        folder.mkdir(parents=True)
        (folder / "state").touch()
    for path in (run.data, run.machines, run.failure, run.replica):
        write_json(path, {"of": "the earlier start"})
    before = files(run.path)
    start(launch, resumes=resumes)
    prepared(run)
    writer.withdraw(run)
    of_starts = {
        path.relative_to(run.path) for path in (run.own_plan, run.preflight, run.argv, run.env)
    }
    kept = {name: content for name, content in before.items() if Path(name) not in of_starts}
    after = files(run.path)
    after.pop("tokenizer/tokenizer.json")  # the same for each start
    assert after == kept and str(run.plan.relative_to(run.path)) in kept


def test_files_of_a_run_without_a_plan_are_kept(start: Start) -> None:
    run = start()
    run.metrics.touch()
    writer.withdraw(run)
    assert [*files(run.path)] == [run.metrics.name]


def test_another_run_of_that_name_is_not_overwritten(start: Start) -> None:
    run = start()
    before = files(run.path)
    with pytest.raises(UserError) as refused:
        start("second")
    problem = only(refused.value.problems)
    assert problem.code == "run_name.taken"
    (fix,) = problem.fixes  # node 0 may not have that run: no --resume
    assert f"--run_name={NAME}_2" in fix
    assert files(run.path) == before


def test_on_a_common_disk_it_removes_its_part_alone(start: Start, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / NAME, 1)
    run.path.mkdir(parents=True)
    run.token(TOKEN).touch()
    write_json(run.plan, {"launch": "of node 0"})
    start("first")
    assert read_json(run.own_plan)
    writer.withdraw(run)
    assert read_json(run.plan) == {"launch": "of node 0"} and not run.own.exists()
