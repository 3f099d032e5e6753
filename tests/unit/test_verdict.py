"""Verdict on an outcome: cause, kind and guilty rank, in failure.json and in the failure card."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from tests.unit.test_launch_recovery import beat_at
from training.core.errors import Exit
from training.core.rundir import RunDir, write_json
from training.diagnose import card, exception_cause
from training.host import cgroups
from training.launcher import failure_report
from training.launcher.outcome import Outcome
from training.watchdog import rank_exit
from training.watchdog.hang_report import DESYNC, HANG, UNEVEN, HangFinding
from training.watchdog.rank_exit import RankExit

ABORT = -signal.SIGABRT


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    beat_at(made, 7)
    return made


def plan(device: str = "cpu", **more: Any) -> dict[str, Any]:
    values = {
        "total_batch_size": 512,
        "device_batch_size": 8,
        "num_workers": 0,
        "out_dir": "experiments",
        "log_dir": "logs",
    }
    return {
        "config": values,
        "origins": dict.fromkeys(values, "default"),
        "command": {"script": "launch_train.sh", "args": []},
        "ranks": 2,
        "batch": {"device_sequences": 8, "seq_len": 32, "world_size": 2, "accumulation": 1},
        "device": {"value": device, "reason": ""},
        "gpus": [],
    } | more


def report_error(
    run: RunDir,
    rank: int,
    kind: str,
    message: str,
    time: float = 1.0,
    guilty: int | None = None,
    **more: object,
) -> None:
    """Write the error report of a rank."""
    facts = {
        "rank": rank,
        "guilty_rank": rank if guilty is None else guilty,
        "time": time,
        "type": kind,
        "message": message,
    }
    write_json(
        run.rank_error(rank),
        facts | {"where": f"model.py:{rank}", "phase": None, "disk_full": False} | more,
    )


def failed(run: RunDir, status: int = 1, rank: int | None = 1, **outcome: Any) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "guilty": (rank, status),
        "here": (rank, status),
        "phases": {0: "step 7: backward", 1: "step 7: forward"},
    }
    return failure_report.failure(Outcome(**shown | outcome), run, plan())


def verdict(record: dict[str, Any]) -> tuple[str, str, int | None]:
    return record["cause"], record["kind"], record["rank"]


# ── exceptions
# ──────────────────────────────────────────────────────────────────────────────────────────────────


@each(
    ("kind", "message", "expected"),
    [
        ("ValueError", "planted", "exception"),
        ("NotFinite", "loss is nan on rank 1", "nan_loss"),
        ("ParametersDiffer", "weights", "ddp_params_mismatch"),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.50 GiB.", "gpu_oom"),
        ("AcceleratorError", "CUDA error: out of memory\nCUDA kernel errors might be …", "gpu_oom"),
        ("DistBackendError", "NCCL error … Cuda failure 2 'out of memory'", "gpu_oom"),
        (
            "AcceleratorError",
            "CUDA error: an illegal memory access was encountered",
            "cuda_device_assert",
        ),
        ("AcceleratorError", "CUDA error: device-side assert triggered", "cuda_device_assert"),
        ("AcceleratorError", "CUDA error: uncorrectable ECC error encountered", "gpu_hardware"),
        (
            "RuntimeError",
            "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",
            "gpu_hardware",
        ),
        (
            "RuntimeError",
            "DataLoader worker (pid 3216) is killed by signal: Killed. ",
            "dataloader_worker_died",
        ),
        (
            "RuntimeError",
            "DataLoader worker (pid(s) 3216, 3217) exited unexpectedly",
            "dataloader_worker_died",
        ),
        (
            "RuntimeError",
            "DataLoader worker (pid 9) is killed by signal: Bus error. It is possible that "
            "dataloader's workers are out of shared memory.",
            "shm_too_small",
        ),
        (
            "ValueError",
            "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback …",
            "exception",
        ),
        (
            "RuntimeError",
            "[…/pair.cc:537] Read error [127.0.0.1]:46811: Connection reset by peer.",
            "peer_died",
        ),
        (
            "RuntimeError",
            "[…/pair.cc:553] Connection closed by peer [127.0.0.1]:5006.",
            "peer_died",
        ),
        ("DistNetworkError", "failed to recv, got 0 bytes", "peer_died"),
        (
            "RuntimeError",
            "Timed out waiting 1800000ms for send operation to complete",
            "collective_timeout",
        ),
        (
            "DistStoreError",
            "Timed out after 1801 seconds waiting for clients. 1/3 clients joined.",
            "rendezvous_timeout",
        ),
        (
            "DistNetworkError",
            "The server socket has failed to listen on any local network address. port: 29500, "
            "name: EADDRINUSE",
            "port_in_use",
        ),
        ("BarrierError", "barrier 'x': rank 1 did not arrive within 3 s", "hang"),
    ],
)
def test_cause_of_a_reported_exception(run: RunDir, kind: str, message: str, expected: str) -> None:
    report_error(run, 1, kind, message)
    record = failed(run)
    assert verdict(record) == (expected, "error", 1)
    assert record["summary"] == f"{kind}: {message.splitlines()[0]}"
    assert (record["where"], record["step"], record["phase"]) == (
        "model.py:1",
        7,
        "step 7: forward",
    )


def test_a_long_exception_message_is_truncated(run: RunDir) -> None:
    report_error(run, 1, "OutOfMemoryError", "CUDA out of memory. " + "x" * 1000)
    assert (
        len(failed(run)["summary"]) == len("OutOfMemoryError: ") + failure_report.SHOWN_CHARACTERS
    )


def test_a_rank_that_lost_a_peer_is_the_victim_of_that_peer(run: RunDir) -> None:
    """The supervisor may see both exits at once, the victim's first."""
    report_error(run, 0, "RuntimeError", "Connection closed by peer [127.0.0.1]:5006", time=2.0)
    report_error(run, 1, "ValueError", "planted", time=1.0)
    record = failed(run, rank=0)
    assert verdict(record) == ("exception", "error", 1) and not record["victim"]


def test_an_error_after_the_loss_of_a_peer_is_not_its_cause(run: RunDir) -> None:
    report_error(run, 0, "RuntimeError", "Connection reset by peer", time=1.0)
    report_error(run, 1, "ValueError", "in a clean-up", time=2.0)
    record = failed(run, rank=0)
    assert (record["cause"], record["rank"], record["victim"]) == ("peer_died", 0, True)


def test_a_rank_can_report_another_rank_as_guilty(run: RunDir) -> None:
    report_error(run, 0, "NotFinite", "loss is nan on rank 1 at step 5", guilty=1)
    assert failed(run, rank=0)["rank"] == 1


# ── deaths ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("status", "cause", "value"),
    [
        (-9, "killed", "SIGKILL"),
        (-15, "killed", "SIGTERM"),
        (-11, "segfault", "SIGSEGV"),
        (-6, "unknown", "SIGABRT"),
        (0, "exit_status", "status 0"),
        (7, "exit_status", "status 7"),
    ],
)
def test_a_rank_without_an_error_report(run: RunDir, status: int, cause: str, value: str) -> None:
    record = failed(run, status)
    assert verdict(record) == (cause, "died", 1)
    assert value in record["summary"] and record["advice"]


@pytest.mark.parametrize(
    ("message", "values"), [("3", ["status 3"]), ("no data", ["status 1", "no data"])]
)
def test_sys_exit_of_a_script_is_reported_with_its_line(
    run: RunDir, message: str, values: list[str]
) -> None:
    report_error(run, 1, "SystemExit", message)
    report_error(run, 0, "RuntimeError", "Connection closed by peer [127.0.0.1]:5006", time=2.0)
    record = failed(run, rank=0)  # the exit that was seen first
    assert verdict(record) == ("exit_status", "died", 1) and record["where"] == "model.py:1"
    assert all(value in record["summary"] for value in values)


def test_an_earlier_exception_of_the_rank_is_the_cause(run: RunDir) -> None:
    report_error(
        run,
        1,
        "SystemExit",
        "1",
        before=[
            {
                "type": "OutOfMemoryError",
                "message": "CUDA out of memory. Tried to allocate 2.00 GiB",
            }
        ],
    )
    assert failed(run)["cause"] == "gpu_oom"
    report_error(
        run,
        1,
        "RuntimeError",
        "no data",
        before=[{"type": "ConnectionResetError", "message": "Connection reset by peer"}],
    )
    assert failed(run)["cause"] == "exception", "it may be any connection"


TRACEBACK = (
    'Traceback (most recent call last):\n  File "/prog", line 3, in <module>\n    '
    "main()\nValueError: planted\n"
)


@pytest.mark.parametrize(("after", "found"), [("a last line\n", True), ("step\n" * 10_000, False)])
def test_a_traceback_at_the_end_of_a_log_is_the_cause(run: RunDir, after: str, found: bool) -> None:
    """For a program that does not report exceptions; a much earlier traceback does not count."""
    run.rank_log(1).write_text("ready\n" + TRACEBACK + after)
    record = failed(run)
    assert verdict(record) == (("exception", "error", 1) if found else ("exit_status", "died", 1))
    assert record["where"] == ("/prog:3" if found else None)
    assert ("ValueError: planted" in record["summary"]) == found


def test_a_program_that_lost_a_peer_is_a_victim(run: RunDir) -> None:
    run.rank_log(1).write_text(
        TRACEBACK.replace(
            "ValueError: planted", "RuntimeError: Connection closed by peer [127.0.0.1]:5006"
        )
    )
    record = failed(run)
    assert record["cause"] == "peer_died" and record["victim"]


# ── order of the exits
# ────────────────────────────────────────────────────────────────────────────────────────────

LOST = ("RuntimeError", "Connection closed by peer [127.0.0.1]:5006")


def left_at(run: RunDir, rank: int, time: float) -> None:
    """The script of this rank has completed, or called sys.exit(0)."""
    write_json(run.ranks / f"rank{rank}.ended", {"time": time, "where": f"main.py:{rank}"})


def test_an_earlier_exit_with_status_0_is_the_cause_of_a_lost_peer(run: RunDir) -> None:
    report_error(run, 0, *LOST, time=2.0)
    assert rank_exit.left_before(run, 0, [(0, 1)], {}) is None, "no other exit is known"
    assert rank_exit.left_before(run, 0, [(1, 0), (0, 1)], {}) == (1, 0)
    left_at(run, 1, 1.0)
    assert rank_exit.left_before(run, 0, [(0, 1)], {}) == (1, 0), (
        "its process was still exiting when the victim's exit was seen"
    )
    assert rank_exit.explain(run, 1, 0, [], {}).where == "main.py:1"


@each("status", [75, 130])
def test_an_earlier_exit_as_if_asked_to_stop_is_the_cause_of_a_lost_peer(
    run: RunDir, status: int
) -> None:
    report_error(run, 0, *LOST, time=2.0)
    assert rank_exit.left_before(run, 0, [(1, status), (0, 1)], {}) == (1, status)
    end = {"time": 1.0, "where": "main.py:9", "status": status}
    write_json(run.ranks / "rank1.ended", end)
    assert rank_exit.left_before(run, 0, [(0, 1)], {}) == (1, status)
    assert rank_exit.explain(run, 1, status, [], {}).where == "main.py:9"


def test_a_later_exit_with_status_0_is_not_the_cause(run: RunDir) -> None:
    report_error(run, 0, *LOST, time=2.0)
    left_at(run, 1, 3.0)
    assert rank_exit.left_before(run, 0, [(0, 1)], {}) is None


def test_an_own_failure_is_not_excused_by_an_earlier_exit(run: RunDir) -> None:
    left_at(run, 1, 1.0)
    report_error(run, 0, "ValueError", "planted", time=2.0)
    assert rank_exit.left_before(run, 0, [(1, 0), (0, 1)], {}) is None
    report_error(run, 0, *LOST, time=3.0)
    report_error(run, 2, "ValueError", "planted", time=2.0)
    assert rank_exit.left_before(run, 0, [(1, 0), (0, 1)], {}) is None, (
        "another rank failed before the loss"
    )


def test_a_lost_peer_is_recognised_behind_sys_exit_and_in_a_log(run: RunDir) -> None:
    report_error(
        run, 0, "SystemExit", "1", time=2.0, before=[{"type": LOST[0], "message": LOST[1]}]
    )
    assert rank_exit.left_before(run, 0, [(1, 0), (0, 1)], {}) == (1, 0)
    run.rank_error(0).unlink()
    assert rank_exit.left_before(run, 0, [(1, 0), (0, 1)], {}) is None
    run.rank_log(0).write_text(TRACEBACK.replace("ValueError: planted", ": ".join(LOST)))
    assert rank_exit.left_before(run, 0, [(1, 0), (0, 1)], {}) == (1, 0), (
        "a program that does not report exceptions"
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("what():  CUDA error: uncorrectable ECC error encountered", "gpu_hardware"),
        ("what():  CUDA error: an illegal memory access was encountered", "cuda_device_assert"),
        (
            "Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, "
            "Timeout(ms)=9000) ran for 9011 ms",
            "collective_timeout",
        ),
        ("free(): invalid pointer", "unknown"),
    ],
)
def test_the_log_explains_an_abort(run: RunDir, line: str, expected: str) -> None:
    earlier = "an earlier start: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    run.rank_log(1).write_text(f"{earlier}terminate called after …\n{line}\nframe #0: …\n")
    since = {run.rank_log(1): len(earlier)}
    record = failed(run, ABORT, log_from=since)
    assert record["cause"] == expected and "SIGABRT" in record["summary"]
    assert (line in record["summary"]) == (expected != "unknown")
    assert failed(run, -signal.SIGKILL, log_from=since)["cause"] == "killed", (
        "a killed rank does not explain itself"
    )


@pytest.mark.parametrize(
    ("before", "now", "cause"),
    [(3, 4, "host_oom_killed"), (3, 3, "killed"), (None, 4, "killed"), (3, None, "killed")],
)
def test_the_kernels_oom_kill_count_explains_sigkill(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, before: int | None, now: int | None, cause: str
) -> None:
    monkeypatch.setattr(cgroups, "oom_kills", lambda: now)
    record = failed(run, -signal.SIGKILL, oom_kills=before)
    assert record["cause"] == cause and "SIGKILL" in record["summary"]
    assert ("from 3 to 4" in record["summary"]) == (cause == "host_oom_killed")
    assert failed(run, -signal.SIGSEGV, oom_kills=before)["cause"] == "segfault"


CARDS = [
    {"index": n, "uuid": f"GPU-000000a{n}-0000-4000-8000-000000000000", "name": "Card"}
    for n in (0, 1)
]
SHOWN = {"uuids": [CARDS[0]["uuid"]], "reason": "1 on this machine"}


def test_a_lost_gpu_is_the_cause(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = plan("cuda", gpus=CARDS)
    monkeypatch.setattr(exception_cause, "ASK", f"print({json.dumps(json.dumps(SHOWN))})")
    report_error(run, 1, "AcceleratorError", "CUDA error: unspecified launch failure")
    record = failure_report.failure(Outcome(guilty=(1, 1), here=(1, 1)), run, trained)
    assert verdict(record) == ("gpu_hardware", "error", 1)
    assert record["summary"].startswith("GPU 1 (Card) ")
    assert SHOWN["reason"] in record["summary"]


def test_the_driver_is_queried_in_a_separate_process(
    fake_driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_driver))
    monkeypatch.setenv("FAKE_NVML_COUNT", "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert exception_cause.lost_gpus(plan("cuda", gpus=CARDS)) == ""
    monkeypatch.setenv("FAKE_NVML_COUNT", "1")
    assert exception_cause.lost_gpus(plan("cuda", gpus=CARDS)).startswith("GPU 1 (Card) ")


def test_a_driver_that_does_not_answer_has_a_time_limit(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exception_cause, "DRIVER_S", 0.2)
    monkeypatch.setattr(exception_cause, "ASK", "import time; time.sleep(3600)")
    record = failure_report.failure(
        Outcome(guilty=(1, 1), here=(1, 1)), run, plan("cuda", gpus=CARDS)
    )
    assert verdict(record) == ("gpu_hardware", "died", 1)
    assert "0.2 s (NVML)" in record["summary"]


def test_without_an_answer_from_nvml_no_gpu_is_reported_lost(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exception_cause, "ASK", "raise SystemExit('no room for a process')")
    assert exception_cause.lost_gpus(plan("cuda", gpus=CARDS)) == ""
    assert "no room for a process" in capfd.readouterr().err


def test_the_place_of_a_crash(run: RunDir) -> None:
    record = failed(run, -11, death=RankExit("died", 1, "model.py:12", "killed by SIGSEGV"))
    assert verdict(record) == ("segfault", "died", 1) and record["where"] == "model.py:12"


def test_an_abort_by_gloo_for_another_collective_is_a_desync(run: RunDir) -> None:
    how = "rank 1 got 8 bytes where its all_reduce expects 16"
    record = failed(run, ABORT, death=RankExit(DESYNC, None, None, how))
    assert verdict(record) == ("unknown", "desync", None) and record["summary"] == how
    assert record["advice"][0].startswith("every rank must call the same collectives")


# ── findings
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def finding(kind: str = HANG, rank: int | None = 1) -> HangFinding:
    waits = {0: "step 7: backward, waits in backward"}
    return HangFinding(
        kind,
        rank,
        "model.py:12" if rank else None,
        "is stuck at model.py:12",
        waits,
        {},
        3.2,
        "step 7: forward",
        "/runs/hangs/1",
    )


CARD = """\
  Cause      hang: rank 1 is stuck at model.py:12, for 3.2 s
  Who        rank 1, in step 7: forward
  Where      model.py:12
  Others     rank 0: step 7: backward, waits in backward
"""


def test_failure_record_and_card_of_a_hang(run: RunDir) -> None:
    report_error(run, 0, "RuntimeError", "Connection reset by peer")  # a consequence of the hang
    record = failed(run, 0, finding=finding())
    expected = {
        "cause": "hang",
        "kind": "hang",
        "rank": 1,
        "where": "model.py:12",
        "phase": "step 7: forward",
        "since_s": 3.2,
    }
    expected |= {
        "waiting": {"0": "step 7: backward, waits in backward"},
        "stacks": "/runs/hangs/1",
        "exit_code": 5,
        "victim": False,
    }
    assert {name: record[name] for name in expected} == expected
    assert record["summary"] == "rank 1 is stuck at model.py:12, for 3.2 s"
    text = card.of_run(record)
    assert text.partition("  Try")[0] == CARD and "  Stacks     /runs/hangs/1\n" in text


def test_a_hang_without_a_guilty_rank(run: RunDir) -> None:
    report_error(run, 0, "RuntimeError", "Connection reset by peer")
    record = failed(run, 0, None, finding=finding(rank=None))
    assert record["rank"] is None and "no single rank" in card.of_run(record)


@pytest.mark.parametrize(
    ("kind", "advice"),
    [(DESYNC, "every rank must call the same collectives"), (UNEVEN, "the same number of batches")],
)
def test_advice_for_ranks_that_differ(run: RunDir, kind: str, advice: str) -> None:
    record = failed(run, 0, finding=finding(kind))
    assert record["kind"] == kind and advice in record["advice"][0]
    assert record["summary"].startswith("rank 1 is stuck") == (kind == UNEVEN)


# ── failure card and exit code
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_advice_for_out_of_memory_has_the_values_of_the_plan(run: RunDir) -> None:
    report_error(run, 1, "OutOfMemoryError", "CUDA out of memory.")
    advice = failed(run)["advice"]
    assert all(value in advice[0] for value in ("device_batch_size is 8", "try 4", "512 tokens"))
    assert advice[1] == "./launch_train.sh 2 --resume=run --device_batch_size=4"


def test_a_reported_error_has_the_advice_of_its_signature(run: RunDir) -> None:
    """Not only the general one of its cause, which is about a rejected configuration."""
    text = "put_ does not have a deterministic implementation, but you set 'torch.use_…(True)'."
    report_error(run, 1, "RuntimeError", text)
    record = failed(run)
    assert verdict(record) == ("config_error", "error", 1)
    assert [word in " ".join(record["advice"]) for word in ("put_", "--deterministic")] == [
        True
    ] * 2


def test_a_card_without_evidence_has_no_section_for_it(run: RunDir) -> None:
    record = failed(run, -9)
    assert "Evidence" not in card.of_run(record) and "Stacks" not in card.of_run(record)
    run.rank_log(1).write_text("last line\n    ~~~~^^^\n")
    assert "  Evidence\n      │ last line\n  Try" in card.of_run(failed(run, -9))


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome(ended=[(0, 0), (1, 0)]), 0),
        (Outcome(ended=[(0, 75), (1, 75)]), 75),
        (Outcome(guilty=(1, -9)), 4),
        (Outcome(guilty=(1, 2)), 2),
        (Outcome(guilty=(1, 2), ours=False), 4),
        (Outcome(guilty=(1, 0), finding=finding()), 5),
        (Outcome(guilty=(1, -15), asked=Exit.PREEMPTED), 75),
        (Outcome(killed=True, asked=Exit.INTERRUPTED), 130),
    ],
)
def test_exit_codes(outcome: Outcome, code: int) -> None:
    assert failure_report.exit_code(outcome) == code
