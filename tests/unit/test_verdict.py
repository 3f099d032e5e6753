"""Verdict on ranks that died: the cause, its kind and the guilty rank."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from tests.unit.verdicts import TRACEBACK, failed, new_run, plan, report_error, verdict
from training.core import cause_ids
from training.core.contracts.verdict import FailureRecord
from training.core.messages import msg
from training.core.rundir import RunDir, write_json
from training.diagnose import card, error_reports, exception_cause
from training.host import cgroups
from training.launcher import failure_report
from training.launcher.outcome import Outcome
from training.watchdog import rank_exit


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return new_run(tmp_path)


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
    assert any("status 0 at" in sentence for sentence in record["advice"]) == (status == 0)


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
    assert not any("status 0 at" in sentence for sentence in record["advice"])


REPORT = """\
[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:22192. This is typically caused by a
E1126 22:17:21 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {status}) \
local_rank: 1 (pid: 494) of binary: /usr/bin/python
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 10, in <module>
    sys.exit(main())
  File "/usr/lib/python3/dist-packages/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 493)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : {status} (pid: 494)
"""


@pytest.mark.parametrize(
    ("status", "cause", "value"),
    [(3, "exit_status", "status 3"), (-9, "killed", "SIGKILL"), (-6, "unknown", "SIGABRT")],
)
def test_the_rank_and_status_of_torchruns_report(
    run: RunDir, status: int, cause: str, value: str
) -> None:
    run.launcher_log("torchrun").write_text(REPORT.format(status=status))
    record = failed(run, rank=None, watched="torchrun")
    assert verdict(record) == (cause, "died", 1)
    assert value in record["summary"] and "exitcode" not in record["summary"]


@pytest.mark.parametrize(
    ("status", "cause"),
    [(3, "exit_status"), (-9, "killed"), (-11, "segfault"), (-6, "unknown"), (1, "exit_status")],
)
def test_the_rank_of_torchruns_report_counts_more_than_the_victims_report(
    run: RunDir, status: int, cause: str
) -> None:
    report_error(run, 0, *LOST)
    run.launcher_log("torchrun").write_text(REPORT.format(status=status))
    record = failed(run, rank=None, watched="torchrun")
    assert verdict(record) == (cause, "died", 1) and not record["victim"]
    assert record["where"] is None and record["status"] == 1
    report_error(run, 0, "ValueError", "planted")
    assert verdict(failed(run, rank=None, watched="torchrun")) == ("exception", "error", 0)


@pytest.mark.parametrize("reported", [True, False])
def test_a_kill_for_memory_that_torchrun_reports(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, reported: bool
) -> None:
    monkeypatch.setattr(cgroups, "oom_kills", lambda: 4)
    if reported:
        report_error(run, 0, *LOST)
    run.launcher_log("torchrun").write_text(REPORT.format(status=-9))
    record = failed(run, rank=None, watched="torchrun", oom_kills=3)
    assert verdict(record) == ("host_oom_killed", "died", 1)
    run.launcher_log("torchrun").write_text(REPORT.format(status=-11))
    assert failed(run, rank=None, watched="torchrun", oom_kills=3)["cause"] == "segfault"


SPAWNED = """W1128 12:53:37.648000 20040 /env/lib/python3.11/site-packages/torch/multiprocessing/\
spawn.py:165] Terminating process 20181 via signal SIGTERM
Traceback (most recent call last):
  File "/prog/main.py", line 21, in <module>
    mp.spawn(work, args=(2,), nprocs=2)
  File "/env/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 200, in join
    raise ProcessExitedException(
torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with exit code {status}
"""


@pytest.mark.parametrize(
    ("status", "expected"), [(3, ("exit_status", "died", 1)), (255, ("exit_status", "died", 1))]
)
def test_the_rank_and_status_of_a_spawned_process(
    run: RunDir, status: int, expected: tuple[str, str, int | None]
) -> None:
    run.launcher_log("python").write_text(SPAWNED.format(status=status))
    record = failed(run, rank=None, watched="python")
    assert verdict(record) == expected and not record["victim"]
    assert f"status {status}" in record["summary"] and "SIGTERM" not in record["summary"]


def test_status_1_of_a_spawned_process_has_a_reason_that_the_log_lacks(run: RunDir) -> None:
    run.launcher_log("python").write_text(SPAWNED.format(status=1))
    assert failed(run, rank=None, watched="python")["cause"] == "peer_died"


LOST = ("RuntimeError", "Connection closed by peer [127.0.0.1]:5006")


@pytest.mark.parametrize(
    ("error", "rank", "expected"),
    [(": ".join(LOST), 0, True), (": ".join(LOST), 1, False), ("ValueError: planted", 0, False)],
)
def test_the_loss_of_a_peer_in_the_log_of_a_watched_command(
    run: RunDir, error: str, rank: int, expected: bool
) -> None:
    """Rank 1 has reported it, so rank 1 is not the cause."""
    log = run.launcher_log("python")
    text = TRACEBACK.replace("ValueError: planted", error)
    log.write_text("".join(f"[rank1]: {line}\n" for line in text.splitlines()))
    assert rank_exit.lost_peer(log, rank, {}) is expected


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


def test_a_connection_of_the_script_itself_is_not_a_lost_peer(run: RunDir) -> None:
    left_at(run, 1, 1.0)
    refused = ("ConnectionRefusedError", "[Errno 111] Connection refused")
    own = ['  File "main.py", line 9, in upload\n']
    report_error(run, 0, *refused, time=2.0, traceback=own)
    assert rank_exit.left_before(run, 0, [(1, 0), (0, 1)], {}) is None
    assert exception_cause.of_error(error_reports.of_rank(run, 0)) == cause_ids.RAISED  # type: ignore[arg-type]
    of_torch = ['  File "…/site-packages/torch/distributed/rendezvous.py", line 9, in f\n']
    report_error(run, 0, *refused, time=2.0, traceback=of_torch)
    assert rank_exit.left_before(run, 0, [(1, 0), (0, 1)], {}) == (1, 0)


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
SHOWN = {"answers": True, "uuids": [CARDS[0]["uuid"]], "reason": "1 on this machine"}


def test_a_lost_gpu_is_the_cause(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = plan("cuda", gpus=CARDS)
    monkeypatch.setattr(exception_cause, "ASK", f"print({json.dumps(json.dumps(SHOWN))})")
    report_error(run, 1, "AcceleratorError", "CUDA error: unspecified launch failure")
    record = failure_report.failure(Outcome(guilty=(1, 1), here=(1, 1)), run, trained)
    assert verdict(record) == ("gpu_hardware", "error", 1)
    assert record["summary"].startswith("GPU 1 (Card) ")
    assert record["lost_ranks"] == [1]
    assert SHOWN["reason"] in record["summary"]


def test_the_driver_is_queried_in_a_separate_process(
    fake_driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_driver))
    monkeypatch.setenv("FAKE_NVML_COUNT", "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert exception_cause.lost_gpus(plan("cuda", gpus=CARDS), 30) == ("", ())
    monkeypatch.setenv("FAKE_NVML_COUNT", "1")
    text, places = exception_cause.lost_gpus(plan("cuda", gpus=CARDS), 30)
    assert text.startswith("GPU 1 (Card) ") and places == (1,)
    assert msg("host.gpus.on_machine", gpus="1 GPU") in text
    part = [{"index": 0, "uuid": "MIG-00000000", "name": "Card MIG 1g.10gb"}]
    by_request_only = exception_cause.lost_gpus(plan("cuda", gpus=part), 30)
    assert by_request_only == ("", ())


def test_a_driver_that_was_updated_during_the_run_does_not_make_its_gpus_faulty(
    run: RunDir, fake_driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_driver))
    monkeypatch.setenv("FAKE_NVML_COUNT", "2")
    monkeypatch.setenv("FAKE_NVML_INIT", "18")  # its library and its kernel module differ
    report_error(run, 1, "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB")
    outcome = Outcome(guilty=(1, 1), here=(1, 1))
    record = failure_report.failure(outcome, run, plan("cuda", gpus=CARDS))
    assert verdict(record) == ("gpu_oom", "error", 1)
    assert not record.get("lost_ranks")


@pytest.fixture
def silent_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exception_cause, "DRIVER_S", 0.2)
    monkeypatch.setattr(exception_cause, "PATIENT_S", 0.3)
    monkeypatch.setattr(exception_cause, "ASK", "import time; time.sleep(3600)")


def ended(run: RunDir, status: int, **more: Any) -> FailureRecord:
    outcome = Outcome(guilty=(1, status), here=(1, status))
    return failure_report.failure(outcome, run, plan("cuda", gpus=CARDS, **more))


@pytest.mark.parametrize(
    ("place", "indices", "expected"), [(1, (3, 2), 2), (0, (3, 2), None), (1, (0, 1), None)]
)
def test_an_exhausted_gpu_has_its_number_on_the_machine(
    run: RunDir,
    silent_driver: None,
    place: int,
    indices: tuple[int, int],
    expected: int | None,
) -> None:
    """torch counts the visible GPUs; only the one of the rank's own place is known."""
    gpus = [one | {"index": index} for one, index in zip(CARDS, indices, strict=True)]
    message = f"CUDA out of memory. Tried to allocate 2.00 MiB. GPU {place} has a total capacity"
    report_error(run, 1, "OutOfMemoryError", message)
    outcome = Outcome(guilty=(1, 1), here=(1, 1))
    record = failure_report.failure(outcome, run, plan("cuda", gpus=gpus))
    assert (verdict(record), record.get("gpu")) == (("gpu_oom", "error", 1), expected)
    text = msg("diagnose.card.on_gpu", gpu=expected)
    assert (text in card.of_run(record)) == (expected is not None)


def test_a_driver_that_does_not_answer_has_a_time_limit(run: RunDir, silent_driver: None) -> None:
    record = ended(run, 1)
    assert verdict(record) == ("gpu_hardware", "died", 1)
    assert "0.3 s (NVML)" in record["summary"]
    # another machine waits for an answer: too short a time to prove anything
    place = {"node_rank": 0, "nnodes": 2}
    for status, cause in ((1, "exit_status"), (-9, "killed"), (-11, "segfault"), (-6, "unknown")):
        assert verdict(ended(run, status, place=place)) == (cause, "died", 1)


def test_a_slow_driver_does_not_hide_what_a_rank_has_reported(
    run: RunDir, silent_driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_error(run, 1, "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB")
    record = ended(run, 1)
    assert verdict(record) == ("gpu_oom", "error", 1) and "lost_ranks" not in record
    assert record["summary"].startswith("OutOfMemoryError: CUDA out of memory")
    report_error(run, 1, "RuntimeError", "something went wrong")
    assert verdict(ended(run, 1)) == ("gpu_hardware", "error", 1)


@pytest.mark.parametrize(("kind", "message"), [("KeyError", "'x'"), ("SystemExit", "3")])
def test_a_short_wait_for_the_driver_does_not_hide_an_exception(
    run: RunDir, silent_driver: None, kind: str, message: str
) -> None:
    place = {"node_rank": 0, "nnodes": 2}
    report_error(run, 1, kind, message)
    assert ended(run, 1, place=place)["cause"] in ("exception", "exit_status")
    assert ended(run, 1)["cause"] == "gpu_hardware"
    run.rank_error(1).unlink()
    run.rank_log(1).write_text(TRACEBACK)
    assert verdict(ended(run, 1, place=place)) == ("exception", "error", 1)


def test_a_slow_driver_does_not_hide_what_a_rank_has_printed(
    run: RunDir, silent_driver: None
) -> None:
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    run.rank_log(1).write_text(TRACEBACK.replace("ValueError: planted", error))
    assert verdict(ended(run, 1)) == ("gpu_oom", "died", 1)


def test_without_an_answer_from_nvml_no_gpu_is_reported_lost(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exception_cause, "ASK", "raise SystemExit('no room for a process')")
    assert exception_cause.lost_gpus(plan("cuda", gpus=CARDS), 30) == ("", ())
    assert "no room for a process" in capfd.readouterr().err
