"""Automatic recovery: after a failure of the machine the run continues and ends as if
undisturbed."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.e2e.conftest import Launched
from training.core.rundir import RunDir, read_json, read_records

Launch = Callable[..., Launched]
QUICKSTART = "configs/dual_gpu/quickstart.py"
ENHANCED = ("./train_dual_gpu_enhanced.sh", QUICKSTART)
LAUNCH = ("./launch_train.sh", "2", QUICKSTART)
SAVING = {"num_iterations": 40, "save_every": 5}


def events(run: Launched, kind: str) -> list[dict[str, Any]]:
    return [r for r in read_records(run.run.events) if r["event"] == kind]


def configured(run: Launched, name: str) -> Any:
    return (read_json(run.run.plan) or {})["config"][name]


@pytest.mark.slow
def test_a_run_with_a_killed_rank_ends_bit_for_bit_the_same(launch: Launch, once: Launch) -> None:
    whole = once(*LAUNCH, **SAVING)
    run = launch(*ENHANCED, **SAVING, inject="kill@rank=1,step=23").ok()
    assert run.losses == whole.losses, "bit for bit"
    assert "recovery: at most 2 restarts in a row" in run.output
    assert (
        "restarting from step 20 (1 of 2), 3 steps lost\n" in run.output
        and "resumed from step_00000020" in run.output
    )
    assert "training finished after 1 restart (killed by SIGKILL at step 23)" in run.output
    (restart,), (recovered,) = events(run, "restart"), events(run, "recovered")
    told = {
        name: restart[name]
        for name in ("attempt", "kind", "rank", "step", "resumes_at", "steps_lost", "changes")
    }
    assert told == {
        "attempt": 2,
        "kind": "died",
        "rank": 1,
        "step": 23,
        "resumes_at": 20,
        "steps_lost": 3,
        "changes": {},
    }
    assert 0 < restart["seconds_lost"] < recovered["seconds"] and recovered["step"] == 21
    assert [r["cause"] for r in run.summary["restarts"]] == [restart["cause"]]
    assert not run.run.failure.exists()


@pytest.mark.slow
def test_out_of_memory_continues_with_a_smaller_batch_and_the_same_steps(launch: Launch) -> None:
    # Muon would amplify the last bits, which differ for another order of sums.
    sizes = {
        "total_batch_size": 512,
        "device_batch_size": 8,
        "save_every": 5,
        "precision": "fp32",
        "optimizer": "adamw",
    }
    whole = launch(*LAUNCH, **sizes).ok()
    run = launch(*ENHANCED, **sizes, inject="oom@rank=1,step=7,above=2,attempt=any").ok()
    assert (
        "with device_batch_size 8 → 4, the same 512 tokens per step with 2 × accumulation"
        in run.output
    )
    assert "device_batch_size 4 → 2, the same 512 tokens" in run.output
    assert run.losses == pytest.approx(whole.losses, rel=1e-5), (
        "the same sequences in each step, summed in another order"
    )
    assert configured(run, "device_batch_size") == 2 and configured(run, "total_batch_size") == 512
    assert (
        "2 sequences × 32 tokens × 2 ranks × 4 accumulation steps = 512 tokens per step"
        in run.output
    )
    assert [r["changes"] for r in events(run, "restart")] == [
        {"device_batch_size": [8, 4]},
        {"device_batch_size": [4, 2]},
    ]
    # A later resume does not meet the same failure.
    resumed = launch("./launch_train.sh", "2", tiny=False, resume="run2", num_iterations=14).ok()
    assert "2 sequences × 32 tokens × 2 ranks × 4 accumulation steps" in resumed.output


@pytest.mark.soak
def test_out_of_memory_with_one_sequence_fails(launch: Launch) -> None:
    run = launch(
        *ENHANCED, device_batch_size=2, total_batch_size=128, inject="oom@rank=0,step=2,attempt=any"
    )
    assert run.wait() == 4
    assert "device_batch_size 2 → 1, the same 128 tokens" in run.output
    assert "given up: device_batch_size is already 1: try " in run.output
    assert run.failure["cause"] == "gpu_oom" and run.failure["kind"] == "error"


@pytest.mark.soak
def test_a_data_loader_that_keeps_failing_gets_fewer_workers(launch: Launch) -> None:
    run = launch(*ENHANCED, num_workers=2, inject="worker_kill@rank=0,call=3,attempt=any").ok()
    assert "dataloader_worker_died: RuntimeError: DataLoader worker (pid" in run.output
    assert "restarting from the beginning (1 of 2)" in run.output
    assert (
        "with num_workers 2 → 0: the data loader failed again; the ranks load the data "
        "themselves" in run.output
    )
    assert [r["changes"].get("num_workers") for r in events(run, "restart")] == [None, [2, 0]]
    assert configured(run, "num_workers") == 0
    assert (
        "training finished after 2 restarts (dataloader_worker_died at step 1, 2 times)"
        in run.output
    )


@pytest.mark.slow
def test_a_hang_is_stopped_and_the_run_continues(launch: Launch, once: Launch) -> None:
    whole = once(*LAUNCH, **SAVING)
    run = launch(*LAUNCH, **SAVING, retries=1, hang_timeout=3, inject="sleep@rank=1,step=12").ok()
    assert run.losses == whole.losses
    (restart,) = events(run, "restart")
    assert (restart["cause"], restart["kind"], restart["rank"], restart["step"]) == (
        "hang",
        "hang",
        1,
        12,
    )
    assert restart["seconds_lost"] >= 3
    assert "restarting from step 10 (1 of 1), 2 steps lost" in run.output


@pytest.mark.soak
def test_two_equal_failures_at_one_step_are_not_restarted(launch: Launch) -> None:
    run = launch(*ENHANCED, save_every=2, inject="kill@rank=1,step=7,attempt=any")
    assert run.wait() == 4
    assert "restarting from step 6 (1 of 2), 1 step lost" in run.output
    assert "given up: second failure at step 7" in run.output
    assert run.failure["kind"] == "died" and run.failure["step"] == 7
    assert "restarts" not in run.summary


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        pytest.param(
            "raise@rank=1,step=3", "the same exception would recur", marks=pytest.mark.slow
        ),
        pytest.param(
            "nan@rank=1,step=3",
            "the same data would give the same loss",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "exit@rank=1,step=3",
            "a rank that exits by itself would exit again",
            marks=pytest.mark.soak,
        ),
        pytest.param("desync@rank=1,step=3", "a code error recurs", marks=pytest.mark.soak),
    ],
)
def test_a_repeatable_failure_is_not_restarted(launch: Launch, fault: str, why: str) -> None:
    run = launch(*ENHANCED, hang_timeout=3, inject=fault)
    assert run.wait() == (5 if fault.startswith("desync") else 4)
    assert f"not restarted: {why}" in run.output and "restarting" not in run.output
    assert "analysis" in run.output and run.run.failure.exists()


@pytest.mark.soak
def test_restarts_are_off_by_default_and_retries_sets_their_number(
    launch: Launch,
) -> None:
    fault = "kill@rank=0,step=7"
    once = launch(*LAUNCH, inject=fault)
    assert once.wait() == 4
    assert not events(once, "restart")
    assert launch(*LAUNCH, inject=fault, retries=1, save_every=5).ok().summary["steps"] == 12
    assert (
        launch("./train_dual_gpu.sh", QUICKSTART, inject=fault, env={"DUET_RETRIES": "1"})
        .ok()
        .summary["steps"]
        == 12
    )
    none = launch(*ENHANCED, inject=fault, retries=0)
    assert none.wait() == 4
    assert not events(none, "restart")


@pytest.mark.soak
def test_a_stop_after_a_restart_saves_a_checkpoint(launch: Launch) -> None:
    run = launch(*ENHANCED, num_iterations=100000, save_every=5, inject="kill@rank=1,step=7")
    wait_until(lambda: events(run, "recovered") or run.process.poll() is not None)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(30) == 75
    assert (
        "stopped on request, checkpoint saved after 1 restart (killed by SIGKILL at step 7) (exit "
        "75)" in run.output
    )
    assert len(run.summary["restarts"]) == 1 and run.summary["status"] == "stopped"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("fault", "size", "rank"),
    [
        ("kill@rank=1,step=7", 8, 1),
        # it has written the checkpoint of step 5 before
        ("slow@rank=0,step=6,seconds=2;kill@rank=0,step=7", 8, 0),
        ("oom@rank=1,step=7,above=4", 4, 1),
    ],
)
def test_several_machines_restart_together(
    launch: Launch, once: Launch, fault: str, size: int, rank: int
) -> None:
    """Two supervisors with a common disk, here on one machine: node 0 decides, even if a rank of
    the other node failed. Without a common disk: test_own_disks.py."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    whole = once(
        *LAUNCH,
        device_batch_size=8,
        total_batch_size=512,
        optimizer="adamw",
        precision="fp32",
        save_every=5,
    )
    nodes = []
    for number in (1, 0):
        flags = {
            "nnodes": 2,
            "node_rank": number,
            "master_addr": "127.0.0.1",
            "master_port": port,
            "retries": 1,
            "inject": fault,
        }
        flags |= {"device_batch_size": 8, "total_batch_size": 512, "optimizer": "adamw"}
        nodes.append(
            launch(
                "./launch_train.sh",
                "1",
                QUICKSTART,
                name="both",
                save_every=5,
                precision="fp32",
                **flags,
            )
        )
    second, first = nodes
    second.run = RunDir(first.run.path, 1)
    assert (first.wait(), second.wait()) == (0, 0), first.output[-3000:] + second.output[-3000:]
    assert first.losses == (whole.losses if size == 8 else pytest.approx(whole.losses, rel=1e-5))
    assert "restarting from step 5" in first.output and "2 steps lost" in first.output
    assert "training finished after 1 restart" in first.output
    assert "restarting with the other machines" in second.output
    assert [configured(node, "device_batch_size") for node in nodes] == [size, size]
    assert not first.run.failure.exists() and not second.run.failure.exists()
    assert [r["rank"] for r in events(first, "restart")] == [rank] and len(
        events(first, "recovered")
    ) == 1
