"""--min_ranks on the command line: what is rejected, and what the plan records."""

from __future__ import annotations

import pytest

from tests.cases import each
from tests.unit.conftest import LAUNCH, ask, only, wrong
from training.config import meant
from training.config.schema import FIELDS
from training.core.errors import UserError
from training.plan import script_request, training_plan

QUICK = ("2", "configs/dual_gpu/quickstart.py")
MACHINES = ("--nnodes=2", "--node_rank=0", "--master_addr=127.0.0.1", "--master_port=29500")


@each(
    ("flags", "code"),
    [
        (("--min_ranks=3",), "elastic.too_many"),
        (("--min_ranks=5", "--device_batch_size=8", *MACHINES), "elastic.too_many"),
        (("--min_ranks=1", "--launcher=torchrun"), "elastic.place"),
        (("--min_ranks=1", "--retries=0"), "elastic.retries"),
        (("--min_ranks=0",), "field.value"),
        (("--min_ranks=some",), "field.value"),
    ],
    ids=str,
)
def test_what_cannot_work_is_rejected(flags: tuple[str, ...], code: str) -> None:
    assert only(wrong(*QUICK, *flags, script=LAUNCH)).code == code
    if code in ("elastic.too_many", "elastic.place"):
        words = ["2", "--script", __file__, *(f for f in flags if "batch" not in f)]
        with pytest.raises(UserError) as caught:
            script_request.read(LAUNCH, words, {})
        assert [problem.code for problem in caught.value.problems] == [code]


def test_what_is_accepted() -> None:
    job = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}
    job |= {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_NODELIST": "localhost"}
    alone = ask(*QUICK, "--min_ranks=1", script=LAUNCH, env=job)
    assert alone.place.nnodes == 1 and alone.config.min_ranks == 1
    assert ask(*QUICK, "--min_ranks=1", script=LAUNCH).config.min_ranks == 1
    assert ask(*QUICK, "--min_ranks=all", script=LAUNCH).config.min_ranks == "all"
    assert ask(*QUICK, script=LAUNCH).config.min_ranks == "all"


def test_what_the_plan_records() -> None:
    flags = ("--device=cpu", "--total_batch_size=12288", "--dry_run")
    plan = training_plan.make(LAUNCH, ["3", QUICK[1], "--min_ranks=2", *flags], {})[1]
    assert plan["elastic"] == {
        "min_ranks": 2,
        "ranks": 3,
        "device_batch_size": 16,
        "gpus": [],
        "bindings": [None] * 3,
        "seats": [0, 1, 2],
        "lost": [],
        "rejoined": [],
    }
    assert plan["retries"]["value"] == 2
    for off in ("--min_ranks=3", "--min_ranks=all"):
        plan = training_plan.make(LAUNCH, ["3", QUICK[1], off, *flags], {})[1]
        assert "elastic" not in plan


def test_a_range_of_machines_has_an_explanation() -> None:
    values, note = meant.value("nnodes", "1:4", FIELDS)
    assert values == ["4"] and "--min_ranks" in note
    problem = only(wrong(*QUICK, "--nnodes=1:4", script=LAUNCH))
    assert problem.code == "field.value" and note in problem.what
