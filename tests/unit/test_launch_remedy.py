"""Remedies for failures, and how often they are tried."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from tests.unit.conftest import ENHANCED, LAUNCH, TRAIN
from tests.unit.test_launch_recovery import plan
from training import tasks
from training.config.schema import Config
from training.core.messages import msg
from training.host import decisions
from training.launcher import recovery_policy
from training.launcher.recovery_policy import remedy
from training.launcher.replan import changed_plan
from training.launcher.restart import Failure, GiveUp, Restart
from training.plan import batch_text
from training.tasks.memory import SAVINGS

KILL, BUS, SEGV, ABORT = -signal.SIGKILL, -signal.SIGBUS, -signal.SIGSEGV, -signal.SIGABRT


def died(
    status: int = KILL, step: int = 23, saved: int = 20, rank: int | None = 1, changed: bool = False
) -> Failure:
    return Failure(
        "unknown",
        "died",
        rank,
        status,
        step,
        saved,
        f"step {step}: forward",
        "killed by SIGKILL",
        changed,
    )


def error(
    cause: str, step: int = 23, saved: int = 20, rank: int | None = 1, changed: bool = False
) -> Failure:
    return Failure(
        cause, "error", rank, 1, step, saved, f"step {step}: forward", "SomeError: text", changed
    )


def hang(
    kind: str = "hang",
    phase: str = "step 23: forward",
    rank: int | None = 1,
    step: int = 23,
    changed: bool = False,
) -> Failure:
    return Failure("hang", kind, rank, 0, step, 20, phase, "HANG", changed)


FIRST = Restart(1)
CODE, RAISED = "a code error recurs", "the same exception would recur"


@each(
    ("failure", "expected"),
    [
        *((died(status), FIRST) for status in (KILL, BUS, SEGV, ABORT)),
        (died(-signal.SIGTERM), GiveUp(CODE)),
        (died(0), GiveUp("a rank that exits by itself would exit again (killed by SIGKILL)")),
        (died(3), GiveUp("a rank that exits by itself would exit again (killed by SIGKILL)")),
        *((hang(kind), FIRST) for kind in ("hang", "stopped", "blocked", "error")),
        (hang(rank=None), FIRST),
        *((hang(kind), GiveUp(CODE)) for kind in ("desync", "uneven")),
        (replace(hang("desync"), cause="collective_timeout", status=-ABORT), GiveUp(CODE)),
        *(
            (error(cause), Restart(1, pause_s=1.0))
            for cause in ("peer_died", "port_in_use", "rendezvous_timeout", "collective_timeout")
        ),
        (error("dataloader_worker_died"), FIRST),
        (error("unknown"), GiveUp(RAISED)),
        *(
            (error(cause), GiveUp(msg("launcher.retry.never.no_gpu")))
            for cause in ("no_gpu", "cuda_driver_too_old")
        ),
        (error("config_error"), GiveUp(recovery_policy.NEVER["config_error"])),
        (error("too_many_open_files"), GiveUp(RAISED)),
        (Failure("preempted", "asked", None, 0, 3, 0, "", "stopped at once"), GiveUp("")),
        (error("nan_loss"), GiveUp(recovery_policy.NEVER["nan_loss"])),
        (
            error("ddp_params_mismatch"),
            GiveUp(recovery_policy.NEVER["ddp_params_mismatch"]),
        ),
        (error("cuda_device_assert"), GiveUp(CODE)),
        (error("gpu_hardware"), GiveUp(recovery_policy.NEVER["gpu_hardware"])),
        (error("disk_full"), GiveUp(recovery_policy.NEVER["disk_full"])),
        (error("shm_too_small"), GiveUp(msg("launcher.retry.never.shm"))),
        (error("host_oom_killed"), GiveUp(recovery_policy.NEVER["host_oom_killed"])),
    ],
    ids=str,
)
def test_remedy_of_each_failure(failure: Failure, expected: Restart | GiveUp) -> None:
    assert remedy(failure, plan(), []) == expected


@pytest.mark.parametrize("failure", [died(), hang(), error("gpu_oom"), error("unknown")], ids=str)
def test_no_remedy_unless_restarts_were_requested(failure: Failure) -> None:
    assert remedy(failure, plan(retries=0), []) == GiveUp("")


@pytest.mark.parametrize("status", [ABORT, KILL])
def test_no_restart_after_a_signal_with_a_gpu_error(status: int) -> None:
    broken = Failure("gpu_hardware", "died", 0, status, 5, 0, "step 5: backward", "killed")
    assert remedy(broken, plan(), []) == GiveUp(recovery_policy.NEVER["gpu_hardware"])


# ── number of restarts


def test_no_restart_after_a_second_equal_failure_at_a_step() -> None:
    assert remedy(died(), plan(), [died()]) == GiveUp("second failure at step 23")
    assert remedy(died(), plan(retries=9), [died(), died(step=22)]) == GiveUp(
        "second failure at step 23"
    )


@pytest.mark.parametrize("other", [died(SEGV), died(step=22), died(rank=0), hang()], ids=str)
def test_restart_after_a_different_failure_or_at_another_step(other: Failure) -> None:
    assert remedy(died(), plan(), [other]) == Restart(2)


def test_the_same_failure_after_a_change_counts_as_new() -> None:
    assert remedy(died(), plan(), [died(), error("gpu_oom", changed=True)]) == Restart(2)


def test_consecutive_restarts_are_bounded() -> None:
    logged = GiveUp("2 consecutive restarts made no progress (retries is 2: as asked)")
    assert remedy(died(step=25), plan(), [died(), died(step=24)]) == logged
    assert remedy(died(step=24), plan(retries=1), [died()]) == GiveUp(
        "1 consecutive restart made no progress (retries is 1: as asked)"
    )


def test_progress_resets_the_count() -> None:
    """A checkpoint at or after the step of the failure is progress; trained steps that are lost
    again are not."""
    before = [died(step=23, saved=20), died(step=24, saved=20)]
    assert remedy(died(step=31, saved=25), plan(), before) == Restart(1)
    assert isinstance(remedy(died(step=29, saved=20), plan(), before), GiveUp)
    weekly = [died(step=1000 * week + 3, saved=1000 * week) for week in range(1, 40)]
    assert remedy(died(step=40_003, saved=40_000), plan(retries=1), weekly) == Restart(1)


def test_a_failure_before_the_first_step_after_a_restart_is_not_progress() -> None:
    """The rank is at the checkpoint then, which has not advanced."""
    assert remedy(died(step=20, saved=20), plan(), [died(step=20, saved=20)]) == GiveUp(
        "second failure at step 20"
    )


@pytest.mark.parametrize("cause", ["nccl_network", "port_in_use", "rendezvous_timeout"])
def test_a_network_failure_at_the_same_step_is_tried_again_after_the_pauses(cause: str) -> None:
    network = [error(cause, step=0, saved=0)] * 4
    chosen = [remedy(network[n], plan(retries=3), network[:n]) for n in range(4)]
    pauses = [(r.number, r.pause_s) for r in chosen if isinstance(r, Restart)]
    assert pauses == [(1, 1.0), (2, 5.0), (3, 15.0)] and isinstance(chosen[3], GiveUp)


@pytest.mark.parametrize("cause", ["peer_died", "collective_timeout"])
def test_the_second_loss_of_a_peer_at_a_step_ends_the_run(cause: str) -> None:
    assert remedy(error(cause), plan(), [error(cause)]) == GiveUp("second failure at step 23")


def test_pauses_grow_for_network_failures_only() -> None:
    network = [error("peer_died", step=step) for step in (21, 22, 24, 25)]
    pauses = [
        r.pause_s
        for n in range(4)
        if isinstance(r := remedy(network[n], plan(retries=9), network[:n]), Restart)
    ]
    assert pauses == [1.0, 5.0, 15.0, 15.0]
    assert remedy(died(step=30), plan(retries=9), network) == Restart(5)


# ── cures ─────────────────────────────────────────────────────────────────────────────────────────


def test_out_of_memory_takes_the_next_smaller_batch_that_divides() -> None:
    chosen = remedy(error("gpu_oom"), plan(), [])
    assert isinstance(chosen, Restart)
    assert chosen.changes == {"device_batch_size": 4} and chosen.number == 0
    assert (
        chosen.label
        == "device_batch_size 8 → 4, the same 512 tokens per step with 2 × accumulation"
    )
    odd = plan(size=14) | {
        "batch": {"device_sequences": 14, "seq_len": 3072, "world_size": 2, "accumulation": 1}
    }
    odd["config"] |= {"total_batch_size": 86016, "max_seq_len": 3072}
    chosen = remedy(error("gpu_oom", rank=None), odd, [])
    assert isinstance(chosen, Restart) and chosen.changes == {"device_batch_size": 7}
    assert chosen.label.startswith("device_batch_size 14 → 7, ")


def test_out_of_memory_goes_down_to_one_sequence_whatever_the_number_of_restarts() -> None:
    now, sizes = plan(retries=1), []
    before: list[Failure] = []
    while isinstance(chosen := remedy(error("gpu_oom"), now, before), Restart):
        sizes.append(chosen.changes["device_batch_size"])
        now = changed_plan(now, chosen.changes, chosen.why)
        before.append(error("gpu_oom", changed=True))
    assert sizes == [4, 2, 1]
    assert chosen == GiveUp(
        "device_batch_size is already 1: try --activation_checkpointing=1 (the same model, slower), "
        "or a smaller --max_seq_len or --depth"
    )


def of_task(name: str, file: Path | None = None) -> dict[str, Any]:
    task = {"name": name, "unit": "samples", "file": str(file) if file else None, "options": {}}
    return plan() | {"task": task}


def test_out_of_memory_where_the_batch_does_not_matter_is_not_cured_by_a_smaller_one(
    tmp_path: Path,
) -> None:
    file = tmp_path / "task.py"
    file.write_text("class Mine(Task):\n    eval_batch = 2\n")
    fixed = of_task("task", file)

    def tried(phase: str, made: dict[str, Any]) -> str | None:
        chosen = remedy(replace(error("gpu_oom"), phase=phase), made, [])
        return chosen.reason if isinstance(chosen, GiveUp) else None

    begin = "the memory of '{}' does not depend on device_batch_size: try {}"
    smaller_model = "ending other processes on the GPU (nvidia-smi), or a smaller model"
    for phase in ("building the model", "gather state", "checkpoint", "sample"):
        for made in (plan(), fixed, of_task("video_restoration")):
            assert tried(phase, made) == begin.format(phase, smaller_model)
    pieces = "restoring each clip in smaller pieces: --num_frame_testing (frames), "
    for phase in ("first evaluation", "evaluation"):
        assert tried(phase, of_task("video_restoration")) == begin.format(
            phase, f"{pieces}--size_patch_testing (pixels)"
        )
        assert tried(phase, fixed) == begin.format(
            phase, f"a smaller eval_batch in {file}, or smaller samples"
        )
    assert tried("step 23: forward", fixed) is None
    file.write_text("class Mine(Task):\n    pass\n")
    assert tried("evaluation", fixed) is None, "it uses the micro-batch"
    assert tried("evaluation", plan()) is None


@pytest.mark.parametrize(
    "failure",
    [
        error("dataloader_worker_died"),
        replace(error("host_oom_killed"), worker=True),
        replace(error("shm_too_small"), worker=True),
        replace(error("shm_too_small"), phase="step 23: fetch"),
        hang(phase="step 23: fetch"),
        hang("stopped", "epoch 2: creating data iterator"),
    ],
    ids=str,
)
def test_a_failing_data_loader_gets_fewer_workers_as_the_last_resort(failure: Failure) -> None:
    now, counts = plan(retries=1), [4]
    before: list[Failure] = []
    assert remedy(failure, now, []) == FIRST
    before.append(failure)
    for _ in range(2):
        chosen = remedy(failure, now, before)
        assert isinstance(chosen, Restart) and chosen.number == 0
        now = changed_plan(now, chosen.changes, chosen.why)
        counts.append(now["config"]["num_workers"])
        before.append(replace(failure, changed=True))
    assert counts == [4, 2, 0]
    assert isinstance(chosen, Restart) and chosen.label.startswith("num_workers 2 → 0: ")
    assert (
        now["origins"]["num_workers"]
        == "from recovery: the data loader of rank 1 failed with 2 workers"
    )


def test_without_workers_persistent_workers_is_off() -> None:
    """A configuration with persistent workers but no workers would be refused at the next
    resume."""
    chosen = remedy(
        error("dataloader_worker_died"),
        plan(workers=1, persistent_workers=True),
        [error("dataloader_worker_died")],
    )
    assert isinstance(chosen, Restart) and chosen.changes == {
        "num_workers": 0,
        "persistent_workers": False,
    }


def test_an_old_failure_of_the_data_loader_does_not_count() -> None:
    earlier = error("dataloader_worker_died", step=23, saved=20)
    assert remedy(error("dataloader_worker_died", step=523, saved=500), plan(), [earlier]) == FIRST


def test_a_hang_outside_the_data_loader_keeps_the_workers() -> None:
    assert remedy(
        hang(phase="step 23: backward"), plan(), [hang(phase="step 22: fetch", step=22)]
    ) == Restart(2)


def test_the_changed_plan_has_all_values_that_depend_on_the_batch() -> None:
    before = plan(use_static_graph=True) | {"static_graph": {"value": True, "reason": "as asked"}}
    after = changed_plan(before, {"device_batch_size": 2}, "rank 1 was out of memory with 8")
    assert after["config"]["device_batch_size"] == after["memory"]["load"]["sequences"] == 2
    assert after["batch"] == {
        "device_sequences": 2,
        "seq_len": 32,
        "world_size": 2,
        "accumulation": 4,
    }
    assert after["device_batch_size"] == {"value": 2, "reason": "rank 1 was out of memory with 8"}
    assert after["origins"]["device_batch_size"] == "from recovery: rank 1 was out of memory with 8"
    assert after["static_graph"]["value"] is False, "it does not work with accumulation"
    assert after["memory"]["activations_bytes"] < before["memory"]["activations_bytes"]
    assert after["memory"]["free_bytes"] == 1 << 30
    assert before["config"]["device_batch_size"] == 8, "the original plan is unchanged"


def test_the_changed_plan_describes_the_memory_of_its_own_batch() -> None:
    """Also the reason of what saves memory: with the old batch it was wrong."""
    before: Any = plan()
    before["config"] = {**vars(Config()), **before["config"], "total_batch_size": 2048}
    before["batch"]["accumulation"] = 4
    before["memory"]["load"] |= {"cuda": True}
    before["memory"]["free_bytes"] = 64 << 30
    sentences = [batch_text.split(before), *tasks.spec_of(before).memory_text(before)]
    before["text"] = ["2 ranks", *sentences, batch_text.size(before)]
    before["notes"] = ["the disk is slow", *tasks.spec_of(before).memory_notes(before)]
    why = "rank 1 was out of memory with 8"
    after = changed_plan(before, {"device_batch_size": 2}, why)
    kept = {"value": 0, "reason": msg("launcher.retry.kept", why=why)}
    assert [after[name] for name in SAVINGS] == [kept, kept, before["loss_chunks"]]
    assert after["text"] == [
        "2 ranks",
        batch_text.split(after),
        *tasks.spec_of(after).memory_text(after),
        msg("plan.text.device_batch_size", size=2, reason=why),
    ]
    assert after["text"][1:3] != before["text"][1:3]
    assert (len(before["notes"]), after["notes"]) == (2, ["the disk is slow"]), "a larger batch"


# ── plans with recovery


@pytest.mark.parametrize(
    ("retries", "script", "started_by", "expected"),
    [
        ("auto", ENHANCED, "spawn", (2, "the default of train_dual_gpu_enhanced.sh")),
        (
            "auto",
            LAUNCH,
            "spawn",
            (0, "--retries=N restarts the ranks after a failure of the machine"),
        ),
        (3, LAUNCH, "spawn", (3, "as asked")),
        (3, LAUNCH, "torchrun", (3, "as asked")),
        (0, ENHANCED, "spawn", (0, "as asked")),
        (3, TRAIN, "env", (0, "only the launcher of the ranks can restart them")),
    ],
)
def test_the_plan_decides_how_often(
    retries: int | str, script: str, started_by: str, expected: tuple[int, str]
) -> None:
    choice = decisions.retries(Config(retries=retries), decisions.Decision(started_by, ""), script)
    assert (choice.value, choice.reason) == expected
