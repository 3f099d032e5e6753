"""`--min_ranks`: which ranks remain after a loss, with which batch, GPUs and memory."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.cases import each
from tests.unit.test_launch_recovery import plan as plan_of_two
from tests.unit.test_launch_recovery import run
from training.config.batch import Batch
from training.config.schema import Config
from training.core.errors import Exit
from training.core.rundir import RunDir, read_json
from training.data.batch_dataset import BatchDataset
from training.data.loader import Batches
from training.launcher import endings, failure_report, fewer_ranks, replan
from training.launcher.outcome import Outcome
from training.launcher.post_run import PostRun
from training.launcher.recovery import Recovery
from training.launcher.recovery_policy import remedy
from training.launcher.restart import Failure, GiveUp, Restart, Team

__all__ = ["run"]  # a fixture

TOTAL, SEQ = 1536, 32  # 48 sequences


def gpu(index: int) -> dict[str, Any]:
    return {"index": index, "uuid": f"GPU-000000a{index}", "name": "Card", "total_bytes": 8 << 30}


def plan(ranks: int = 4, size: int = 4, least: int = 1, total: int = TOTAL) -> dict[str, Any]:
    """Plan of `ranks` ranks with a GPU each."""
    made = plan_of_two(size=size, **{"total_batch_size": total})
    gpus = [gpu(n) for n in range(ranks)]
    accumulation, rest = divmod(total, size * SEQ * ranks)
    assert not rest
    made["config"] = {**vars(Config()), **made["config"]}
    made["memory"]["load"] |= {"ranks": ranks, "total_tokens": total, "sequences": size}
    return made | {
        "ranks": ranks,
        "local_ranks": ranks,
        "device": {"value": "cuda", "reason": ""},
        "gpus": gpus,
        "variables": [],
        "numa": {"value": [None] * ranks, "memory": True, "reason": ""},
        "batch": {
            "device_sequences": size,
            "seq_len": SEQ,
            "world_size": ranks,
            "accumulation": accumulation,
        },
        "memory": made["memory"] | {"free_bytes": 8 << 30},
        "elastic": {
            "min_ranks": least,
            "ranks": ranks,
            "device_batch_size": size,
            "gpus": gpus,
            "bindings": [None] * ranks,
            "seats": list(range(ranks)),
            "lost": [],
            "rejoined": [],
        },
    }


def failed(
    rank: int | None = 1, cause: str = "gpu_hardware", step: int = 23, **more: Any
) -> Failure:
    status = -signal.SIGKILL if cause == "killed" else 1
    values = {"kind": "died", "phase": "", "summary": f"summary {cause}"} | more
    return Failure(cause, rank=rank, status=status, step=step, saved=20, **values)


def after(before: dict[str, Any], failure: Failure, *earlier: Failure) -> dict[str, Any]:
    """The plan of the restart after a failure."""
    chosen = remedy(failure, before, earlier)
    assert isinstance(chosen, Restart) and chosen.team, chosen
    return dict(replan.with_team(before, chosen.team, chosen.why))


def figures(found: dict[str, Any]) -> tuple[int, int, int, list[int]]:
    """(ranks, device batch, accumulation, GPUs)."""
    batch = found["batch"]
    assert found["ranks"] == found["local_ranks"] == batch["world_size"]
    assert found["memory"]["load"]["ranks"] == found["ranks"]
    assert found["config"]["device_batch_size"] == batch["device_sequences"]
    assert Batch(**batch).total_tokens == found["config"]["total_batch_size"]
    assert found["elastic"]["seats"] == [g["index"] for g in found["gpus"]]
    return (
        found["ranks"],
        batch["device_sequences"],
        batch["accumulation"],
        [g["index"] for g in found["gpus"]],
    )


def test_every_single_loss_keeps_the_tokens_of_a_step() -> None:
    for ranks in (2, 3, 4):
        for lost in range(ranks):
            left = [n for n in range(ranks) if n != lost]
            found = after(plan(ranks), failed(lost))
            assert figures(found) == (ranks - 1, 4, 12 // (ranks - 1), left)
            (variable,) = found["variables"]
            assert variable["name"] == "CUDA_VISIBLE_DEVICES"
            assert variable["value"] == ",".join(gpu(n)["uuid"] for n in left)
            (one,) = found["elastic"]["lost"]
            assert (one["seat"], one["gpu"], one["cause"]) == (lost, lost, "gpu_hardware")


def test_losses_add_up_to_the_minimum() -> None:
    found = after(plan(4, least=2), failed(1))
    found = after(found, failed(1))  # the second of the remaining ones
    assert figures(found) == (2, 4, 6, [0, 3])
    assert [one["gpu"] for one in found["elastic"]["lost"]] == [1, 2]
    assert isinstance(remedy(failed(0), found, []), GiveUp)


def test_an_unused_gpu_replaces_the_next_lost_one() -> None:
    """8 sequences cannot be divided among three ranks."""
    found = after(plan(4, size=2, total=8 * SEQ), failed(0))
    assert figures(found) == (2, 2, 2, [1, 2])
    assert figures(after(found, failed(1))) == (2, 2, 2, [1, 3])


def test_the_largest_device_batch_that_divides_is_used() -> None:
    """24 sequences: 6 per rank do not divide among three ranks with 4, but with 4 they do."""
    found = after(plan(4, size=6, total=24 * SEQ), failed(3))
    assert figures(found) == (3, 4, 2, [0, 1, 2])
    assert "from recovery" in found["origins"]["device_batch_size"]


def test_muon_s_state_on_fewer_ranks_may_need_a_smaller_batch() -> None:
    wide = plan(2, size=4, total=8 * SEQ)
    wide["memory"]["load"] |= {"depth": 24, "muon": True, "vocab": 65536, "seq_len": 4096}
    wide["batch"]["seq_len"] = wide["config"]["max_seq_len"] = 4096
    wide["config"]["total_batch_size"] = wide["memory"]["load"]["total_tokens"] = 8 * 4096
    load = wide["memory"]["load"]
    assert fewer_ranks._fits(wide | {"memory": {"load": load, "free_bytes": None}}, 4, 1)
    from training import tasks

    needs = [tasks.step_of(wide, size, 1).estimate.needed for size in (2, 4)]  # type: ignore
    both = tasks.step_of(wide, 4, 2).estimate.needed  # type: ignore
    assert both < needs[1], "a rank alone holds the whole state"
    wide["memory"]["free_bytes"] = (needs[0] + needs[1]) // 2
    team = fewer_ranks.choose(wide, [{"seat": 0}])  # type: ignore
    assert isinstance(team, Team) and team.size == 2


def test_out_of_memory_limits_later_batches() -> None:
    smaller = replan.changed_plan(plan(4), {"device_batch_size": 2}, "out of memory")  # type: ignore
    assert figures(after(dict(smaller), failed(0)))[1] == 2


def test_what_the_driver_does_not_list_counts() -> None:
    """Whichever rank noticed it, and if it looks like a hang."""
    found = after(plan(4), failed(0, gone=(2,)))
    assert figures(found)[3] == [0, 1, 3]
    assert figures(after(plan(4), failed(0, "hang", gone=(2, 3))))[3] == [0, 1]


KERNEL = failed(1, "cuda_device_assert", 7, kind="error", suspect_gpu=True)
ASSERTION = failed(1, "cuda_device_assert", 13)


@each(
    ("first", "second", "lost"),
    [
        (failed(1, "killed", 7), failed(1, "killed", 13), True),
        (failed(1, "killed", 7), failed(1, "killed", 7), False),
        (failed(1, "killed", 7), failed(0, "killed", 13), False),
        (failed(1, "killed", 7, changed=True), failed(1, "killed", 13), False),
        (failed(1, "peer_died", 7), failed(1, "killed", 13), False),
        (failed(1, "host_oom_killed", 7), failed(1, "killed", 13), False),
        (KERNEL, replace(KERNEL, step=13), True),
        (KERNEL, failed(1, "killed", 13), True),
        (KERNEL, replace(KERNEL, step=8), False),  # the same one, noticed a step later
        (KERNEL, replace(KERNEL, step=13, suspect_gpu=False), False),  # an assertion
        (failed(1, "killed", 7), replace(ASSERTION, status=-6), False),
    ],
    ids=str,
)
def test_a_rank_that_fails_twice_in_a_row(first: Failure, second: Failure, lost: bool) -> None:
    chosen = remedy(second, plan(3), [first])
    assert bool(isinstance(chosen, Restart) and chosen.team) is lost


def test_a_kernel_error_is_tried_again_where_its_gpu_can_be_left_out() -> None:
    whole = {k: v for k, v in plan(4).items() if k != "elastic"}
    assert remedy(KERNEL, plan(4), []) == Restart(1)
    assert isinstance(remedy(KERNEL, whole, []), GiveUp), "a code error recurs"
    assert isinstance(remedy(replace(KERNEL, suspect_gpu=False), plan(4), []), GiveUp)
    assert isinstance(remedy(replace(KERNEL, step=1, saved=0), plan(4), []), GiveUp), "first step"
    assert isinstance(remedy(KERNEL, plan(4), [KERNEL]), GiveUp), "the same step"


def test_a_gpu_that_is_back_and_hangs_at_every_start_is_left_out_again() -> None:
    """Another rank that fails at the same step again ends the run: a restart does not help."""
    stuck = failed(1, "hang", 20, kind="hang")
    assert isinstance(remedy(stuck, plan(4), [stuck]), GiveUp)
    whole = plan(4)
    whole["elastic"]["rejoined"] = [1]
    assert remedy(stuck, whole, []) == Restart(1)
    assert figures(after(whole, stuck, stuck))[3] == [0, 2, 3]


def test_a_data_loader_or_a_disk_that_is_stuck_costs_no_gpu() -> None:
    now = plan(4)
    now["config"]["num_workers"] = 4
    for kind in ("hang", "blocked"):
        first = failed(1, "hang", 13, kind=kind, phase="step 13: fetch")
        chosen = remedy(replace(first, step=23, phase="step 23: fetch"), now, [first])
        assert isinstance(chosen, Restart) and chosen.changes == {"num_workers": 2}
        assert chosen.team is None
        for phase in ("checkpoint", "summary"):
            first = replace(first, phase=phase)
            assert remedy(replace(first, step=23), now, [first]) == Restart(2)
        first = replace(first, phase="step 13: forward")
        assert figures(after(now, replace(first, step=23), first))[3] == [0, 2, 3]


def test_a_gpu_that_is_unavailable_at_a_restart_is_lost() -> None:
    busy = failed(2, "no_gpu")
    assert figures(after(plan(4), busy, failed(0, "killed")))[3] == [0, 1, 3]
    assert isinstance(remedy(busy, plan(4), []), GiveUp), "of the launch, or of a resume"


def test_a_suspect_that_cannot_be_left_out_is_tried_again() -> None:
    first, second = failed(1, "killed", 7), replace(failed(1, "killed", 13), saved=10)
    assert remedy(second, plan(2, least=2), [first]) == Restart(2)


def test_without_min_ranks_a_lost_gpu_ends_the_run() -> None:
    whole = {k: v for k, v in plan(4).items() if k != "elastic"}
    assert isinstance(remedy(failed(), whole, []), GiveUp)
    assert isinstance(remedy(failed(rank=None), plan(4), []), GiveUp), "unknown which"
    off = plan(4) | {"retries": {"value": 0, "reason": "as asked"}}
    assert remedy(failed(), off, []) == GiveUp("")


def test_a_batch_that_cannot_be_divided_ends_the_run() -> None:
    one = plan(4, size=2, least=3, total=8 * SEQ)
    assert isinstance(remedy(failed(), one, []), GiveUp)


class _Numbers(BatchDataset):
    def __len__(self) -> int:
        return 48 * 30

    def rows(self, indices: Any, epoch: int = 0) -> Any:
        return np.asarray(indices)


def samples(found: dict[str, Any], used: int, steps: int) -> list[list[int]]:
    """Sample numbers of each optimizer step, of all ranks together."""
    batch = Batch(**found["batch"])
    ranks = [
        Batches(_Numbers(), batch, rank=r, seed=3, workers=0, persistent=False)
        for r in range(batch.world_size)
    ]
    shares = [rank.epoch(0, used) for rank in ranks]
    return [
        # the order in which micro-batches are summed: all ranks' first, all ranks' second, …
        np.concatenate([next(s) for _ in range(batch.accumulation) for s in shares]).tolist()
        for _ in range(steps)
    ]


def test_the_samples_of_each_step_stay_the_same() -> None:
    """4 → 3 → 2 → 1 ranks, each continued from the position of a checkpoint: every step has the
    sequences of the untouched run, in its order."""
    whole, now, found = samples(plan(4), 0, 12), plan(4), []
    for part in range(4):
        found += samples(now, 48 * 3 * part, 3)
        if part < 3:
            now = after(now, failed(0))
    assert now["ranks"] == 1
    assert found == whole


@pytest.mark.parametrize("lost", [0, 2])
def test_ranks_keep_their_numa_nodes(lost: int) -> None:
    bindings = [{"node": n // 2, "cores": [n]} for n in range(4)]
    numa = {"value": bindings, "memory": True, "reason": ""}
    bound = plan(4) | {"numa": numa}
    bound["elastic"]["bindings"] = bindings
    found = after(bound, failed(lost))
    assert found["numa"]["value"] == [b for n, b in enumerate(bindings) if n != lost]


def test_the_next_ranks_see_the_remaining_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    replan.set_visible(after(plan(4), replace(failed(0), gone=(1,))))  # type: ignore
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(gpu(n)["uuid"] for n in (0, 2, 3))


# ── the end of a run that lacks a GPU

LACKS = "; with 3 ranks of 4, without GPU 1"


def test_the_end_of_a_failed_run_names_the_lost_gpu(
    run: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    own: Any = after(plan(4), failed(1)) | {"log_file": "x.log"}
    outcome = Outcome(guilty=(0, -signal.SIGSEGV), here=(0, -signal.SIGSEGV))
    record = failure_report.failure(outcome, run, own)
    assert [one["gpu"] for one in record["lost"]] == [1]
    endings.report_end(run, own, outcome, record, "")
    endings.report_end(run, own, outcome, record, "given up: a reason")
    logged = capfd.readouterr().err
    assert f"training failed{LACKS}\n" in logged
    assert f"training failed, given up: a reason{LACKS}\n" in logged


def test_a_stopped_script_records_the_lost_gpu(
    run: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    script = {"path": "fit.py", "args": [], "python": None, "python_reason": "", "module": False}
    own: Any = after(plan(4), failed(1)) | {"script": script}
    recovery = Recovery(run, own)
    recovery.restarts.append({"text": "x"})  # type: ignore[typeddict-item]
    recovery._texts.append("lost")
    outcome = Outcome(ours=False, asked=Exit.PREEMPTED, ended=[(0, -signal.SIGTERM)])
    assert endings.regular_end(run, own, PostRun(run, own), outcome, recovery) == Exit.PREEMPTED
    summary = read_json(run.summary) or {}
    assert [one["gpu"] for one in summary["lost"]] == [1] and len(summary["restarts"]) == 1
    # the end of a run whose files were copied
    assert summary["time"] == pytest.approx(own["created"] + summary["seconds"])
    assert f"stopped on request after 1 restart (lost){LACKS}: rank 0" in capfd.readouterr().err


def test_a_stop_before_a_restart_records_the_lost_gpu(run: RunDir) -> None:
    own: Any = after(plan(4), failed(1))
    assert Recovery(run, own).stop(signal.SIGTERM) == Exit.PREEMPTED
    record = read_json(run.failure) or {}
    assert [one["gpu"] for one in record["lost"]] == [1] and record["summary"].endswith(LACKS)
