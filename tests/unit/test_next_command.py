"""The command that continues a run on several machines without flags for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from tests.unit.conftest import LAUNCH, TRAIN
from tests.unit.test_summary import plan
from training.core.next_command import next_command
from training.core.rundir import RunDir, write_json

STEP = {"kind": "node", "source": "slurm", "nnodes": 2}
SRUN = {"kind": "rank", "source": "slurm", "nnodes": 1, "world_size": 8, "local_world_size": 4}
POD = {"kind": "node", "source": "platform", "nnodes": 2, "world_size": 1, "local_world_size": 1}
TORCHRUN = SRUN | {"source": "torchrun"}


@each(
    "script, place, command",
    [
        (LAUNCH, STEP, "./launch_train.sh 4"),
        (LAUNCH, STEP | {"nnodes": 1}, "./launch_train.sh 8"),
        (TRAIN, TORCHRUN, "torchrun --nnodes=2 --nproc_per_node=4 train.py"),
        (TRAIN, TORCHRUN | {"local_world_size": 8}, "torchrun --nproc_per_node=8 train.py"),
        (TRAIN, TORCHRUN | {"local_world_size": 0}, "torchrun --nproc_per_node=8 train.py"),
        (TRAIN, SRUN, "srun python -u train.py"),
        (TRAIN, POD, "python train.py"),
        (TRAIN, STEP, "srun python -u train.py"),
    ],
)
def test_the_ranks_of_one_machine(script: str, place: dict[str, Any], command: str) -> None:
    made: Any = plan(script, 8) | {"place": place, "local_ranks": 4}
    assert next_command(made, RunDir("experiments/run1")) == f"{command} --resume=run1"


@pytest.mark.parametrize("nnodes", [1, 2])
def test_the_ranks_before_some_were_lost(nnodes: int) -> None:
    elastic = {"min_ranks": 2, "ranks": 8, "per_node": 4, "device_batch_size": None, "lost": []}
    made: Any = plan(LAUNCH, 6) | {"place": STEP | {"nnodes": nnodes}, "local_ranks": 3}
    command = next_command(made | {"elastic": elastic}, RunDir("experiments/run1"))
    assert command == f"./launch_train.sh {4 if nnodes == 2 else 8} --resume=run1"


def test_a_run_outside_of_the_searched_folder_is_named_by_its_path(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was moved, copied, or selected by its path; the name may be that of another run."""
    runs, default = home / "my runs", home / "experiments"
    for path, config, flags in (
        (default / "run1", {}, "--resume=run1"),
        (default / "run1", {"resume": str(default / "run1")}, "--resume=run1"),
        (runs / "run1", {}, f"--resume='{runs}/run1'"),
        (runs / "run1", {"out_dir": str(runs)}, f"--out_dir='{runs}' --resume=run1"),
        (runs / "run1", {"out_dir": "my runs"}, "--out_dir='my runs' --resume=run1"),
        (default / "run1", {"out_dir": str(runs)}, f"--resume='{default}/run1'"),
    ):
        made: Any = plan(LAUNCH, 8, **config)
        assert next_command(made, RunDir(path)) == f"./launch_train.sh 8 {flags}", (path, config)
    home.joinpath("link").symlink_to(runs)
    linked: Any = plan(LAUNCH, 8, out_dir="link")
    assert next_command(linked, RunDir(runs / "run1")).endswith(" --out_dir=link --resume=run1")
    monkeypatch.chdir("/")  # the folder of a relative path is another one here
    elsewhere: Any = plan(LAUNCH, 8, out_dir="my runs")
    assert next_command(elsewhere, RunDir(runs / "run1")).endswith(f" --resume='{runs}/run1'")
    (runs / "run1").mkdir(parents=True)
    write_json(RunDir(runs / "run1").archived, {})
    assert next_command(plan(LAUNCH, 8), RunDir(runs / "run1")).endswith(" --resume=run1")


@pytest.mark.parametrize("name", ["run1", "/elsewhere/run1"])
def test_a_run_of_a_slurm_job_is_submitted_again(tmp_path: Path, name: str) -> None:
    run = RunDir(tmp_path / "run1")
    run.path.mkdir()
    job = {"name": name, "typed": ["--nodes=2", "--comment=a b"], "again": ["--log_dir=/logs"]}
    write_json(run.path / "code_2.json", job)
    folder = str(tmp_path)
    made: Any = plan(LAUNCH, 8, out_dir=folder) | {"place": STEP, "submission": "code_2"}
    selected = "run1" if name == "run1" else run.path
    flags = f"--nodes=2 '--comment=a b' --log_dir=/logs --resume={selected}"
    assert next_command(made, run, depth=3) == f"./submit_job.sh {flags} --depth=3"
    run.path.joinpath("code_2.json").unlink()
    assert next_command(made | {"local_ranks": 4}, run).startswith("./launch_train.sh 4 ")
