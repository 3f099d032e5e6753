"""What a communication test learns about GPUs, from synthetic outcomes of its ranks; real ones:
tests/e2e."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from training.core.heartbeat import HeartbeatRecord
from training.diagnose import signatures
from training.host import p2p_cache
from training.launcher.communication import run, runner, stages
from training.launcher.communication.result import OF_P2P, CommunicationResult
from training.launcher.communication.runner import CommunicationOutcome

LARGE = "all_reduce of 64 MiB"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)


def key() -> p2p_cache.Key:
    return p2p_cache.key(["GPU-a - - - -", "GPU-b - - - -"], "580", "2.13.0")


def hung() -> CommunicationOutcome:
    return CommunicationOutcome(
        *(2, 20.0), reached={0: LARGE, 1: LARGE}, since_s={0: 15.0, 1: 15.0}, timed_out=True
    )


def moving() -> CommunicationOutcome:
    """Slow, but not a hang."""
    return replace(hung(), since_s={0: 0.5, 1: 0.5})


def failed(error: str = "RuntimeError: no space in /dev/shm") -> CommunicationOutcome:
    return CommunicationOutcome(
        *(2, 20.0),
        reached={0: "warm-up", 1: "warm-up"},
        statuses={0: 1, 1: 1},
        died_at={0: 1.0, 1: 1.0},
        records={rank: {"error": error, "time": 1.0} for rank in (0, 1)},
    )


def worked() -> CommunicationOutcome:
    records = {rank: {"wrong": [], "small_s": 1e-4, "large_s": 1e-2} for rank in (0, 1)}
    return CommunicationOutcome(2, 20.0, statuses={0: 0, 1: 0}, records=records)


def result_of(
    monkeypatch: pytest.MonkeyPatch, *outcomes: CommunicationOutcome, use_percent: int | None = 0
) -> CommunicationResult:
    """A test whose attempts end like this, on two GPUs."""
    left = list(outcomes)
    monkeypatch.setattr(runner, "run", lambda *arguments: left.pop(0))
    gpus = [
        {"uuid": f"GPU-{name}", "index": index, "use_percent": use_percent}
        for index, name in enumerate("ab")
    ]
    plan: Any = {"local_ranks": 2, "device": {"value": "cuda", "reason": ""}, "variables": []}
    result = run.run({**plan, "gpus": gpus, "driver": "580", "torch": "2.13.0"})
    assert not left
    return result


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the ranks by shell commands."""

    def replace(*commands: str) -> None:
        def start(trial: Any, rank: int, env: Any, inherited: Any) -> subprocess.Popen[bytes]:
            return subprocess.Popen(["sh", "-c", commands[rank]], start_new_session=True)

        monkeypatch.setattr(runner._Trial, "_start_one", start)
        monkeypatch.setattr(runner, "STACK_S", 0.0)

    return replace


def test_a_failure_shortly_before_the_limit_ends_the_test(
    programs: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "PEER_GRACE_S", 60.0)  # the limit comes before its end
    programs("sleep 20", "exit 3")
    outcome = runner.run(2, "cpu", {}, limit_s=1.0)
    assert (outcome.statuses, outcome.timed_out) == ({1: 3}, False)
    assert outcome.seconds < 10


def test_the_limit_of_the_start_includes_the_patience(programs: Callable[..., None]) -> None:
    programs("sleep 20", "sleep 20")
    outcome = runner.run(2, "cpu", {}, limit_s=0.1, patience_s=0.2)
    assert outcome.timed_out and outcome.limit_s == pytest.approx(0.5)


@pytest.fixture
def gpu_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks are starting their GPU."""
    beat = HeartbeatRecord(0, 1, 2, 0, 0, 0, 0, 0, 0.0, stages.GPU)
    monkeypatch.setattr(runner.heartbeat, "read", lambda file: beat)


def test_a_slow_driver_is_waited_for(programs: Callable[..., None], gpu_starts: None) -> None:
    programs("sleep 20", "sleep 0.5; exit 3")
    outcome = runner.run(2, "cuda", {}, limit_s=0.05)
    assert (outcome.statuses, outcome.timed_out) == ({1: 3}, False)


def test_a_driver_that_hangs_ends_the_test(
    programs: Callable[..., None], gpu_starts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "GPU_S", 0.2)
    programs("sleep 20", "sleep 20")
    outcome = runner.run(2, "cuda", {}, limit_s=20)
    assert outcome.timed_out and outcome.limit_s == 0.2
    assert outcome.reached == {0: stages.GPU, 1: stages.GPU}


def test_gpus_that_hang_now_are_tested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    result_of(monkeypatch, worked())
    assert p2p_cache.known(key())
    result_of(monkeypatch, hung(), hung())
    assert p2p_cache.known(key()) is None
    result_of(monkeypatch, hung(), worked())
    assert p2p_cache.remembered(key()) == p2p_cache.WITHOUT_P2P


@pytest.mark.parametrize("second", [failed(), moving()], ids=["failed", "slow"])
def test_copies_that_hang_refute_what_was_known_however_the_second_attempt_ends(
    second: CommunicationOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    result_of(monkeypatch, worked())
    result = result_of(monkeypatch, hung(), second)
    assert result.first and result.finding and not result.ok
    assert p2p_cache.known(key()) is None


ILLEGAL = "CUDA error: an illegal memory access was encountered"
NCCL = "DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\n"
SYSTEM = NCCL.replace("cuda", "system")


def aborted() -> CommunicationOutcome:
    """By the thread of torch that watches NCCL, before the rank has reported its error."""
    line = f"[rank0]: Process group watchdog thread terminated with exception: {ILLEGAL}"
    abort = dict.fromkeys((0, 1), -signal.SIGABRT)
    return replace(failed(), statuses=abort, records={0: {}, 1: {}}, output={0: [line], 1: [line]})


@pytest.mark.parametrize(
    "first",
    [
        failed(f"AcceleratorError: {ILLEGAL}"),
        failed(f"{NCCL}failed to open CUDA IPC handle : 217 peer access is not supported"),
        failed(f"{NCCL}Cuda failure 217 'peer access is not supported between these two devices'"),
        aborted(),
    ],
)
def test_an_error_of_copies_is_tried_without_them(
    first: CommunicationOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = result_of(monkeypatch, first, first)
    assert again.first and not again.ok and p2p_cache.remembered(key()) == {}
    (check,) = again.checks()
    assert check.text.count(again.first.text) == 1
    assert "export NCCL_P2P_DISABLE=1" not in check.fixes, "it was tried"
    assert result_of(monkeypatch, first, worked()).ok
    assert p2p_cache.remembered(key()) == p2p_cache.WITHOUT_P2P
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    assert "export NCCL_P2P_DISABLE=1" in result_of(monkeypatch, first).checks()[0].fixes


@pytest.mark.parametrize(
    "error",
    [
        *("OutOfMemoryError: CUDA out of memory.", "AcceleratorError: CUDA error: out of memory"),
        f"{NCCL}Cuda failure 2 'out of memory'",
        f"{NCCL}Error while creating shared memory segment /dev/shm/nccl-abc (size 9637888)",
        f"{SYSTEM}Call to pthread_create failed: Resource temporarily unavailable",
        f"{SYSTEM}Error while attaching to shared memory segment /dev/shm/nccl-abc (size 9637888)",
        f"{NCCL}Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152",
        f"{NCCL}Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000",
        f"{NCCL}Cuda failure 'an illegal instruction was encountered'",
        "AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        "DistNetworkError: The client socket has timed out",
    ],
)
def test_other_errors_are_not(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second attempt that succeeds by chance would be taken for a proof."""
    result = result_of(monkeypatch, failed(error))
    assert result.first is None and not result.ok
    assert "export NCCL_P2P_DISABLE=1" not in result.checks()[0].fixes


@pytest.mark.parametrize("second", [hung(), failed(f"AcceleratorError: {ILLEGAL}")])
def test_an_error_of_copies_refutes_what_was_known(
    second: CommunicationOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    result_of(monkeypatch, worked())
    result = result_of(monkeypatch, failed(f"AcceleratorError: {ILLEGAL}"), second)
    assert result.first and not result.ok and p2p_cache.known(key()) is None


def test_every_error_of_copies_is_in_the_catalogue() -> None:
    assert set(OF_P2P) <= {known.id for known in signatures.signatures()}


def test_the_command_tests_the_gpus_that_the_user_has_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert result_of(monkeypatch, failed()).again.startswith("CUDA_VISIBLE_DEVICES=2,3 ")


def test_busy_gpus_are_learnt_without_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for use, busy in ((None, False), (29, False), (30, True)):
        p2p_cache.forget(key())
        result = result_of(monkeypatch, worked(), use_percent=use)
        known = p2p_cache.known(key())
        assert result.verdict and known and known.get("busy", False) == busy, use
        assert result.verdict.get("busy", False) == busy
        assert bool(result.note) == busy
    result_of(monkeypatch, hung(), worked(), use_percent=30)
    assert p2p_cache.remembered(key()) == p2p_cache.WITHOUT_P2P
