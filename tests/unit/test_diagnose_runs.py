"""`./duet diagnose` of Duet runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from tests.unit.diagnosed import OOM, new_run, plan
from training.cli import diagnose as command
from training.core import find_run, heartbeat, standing
from training.core.messages import LANGUAGES, msg
from training.core.rundir import RunDir, write_json
from training.diagnose import card, result
from training.diagnose.log_parsers import end_detection


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(find_run, "WORK", tmp_path)  # the run is in its experiments/
    return new_run(tmp_path)


def test_advice_for_a_duet_run_has_its_values(run: RunDir) -> None:
    run.rank_log(1).write_text(OOM)
    record = result.diagnose([run.path])
    assert (record["cause"], record["rank"]) == ("gpu_oom", 1)
    assert (
        record["advice"][0]
        == "device_batch_size is 8: try 4, the same 512 tokens per step with 2 × accumulation"
    )
    assert record["advice"][1] == "./launch_train.sh 2 --resume=run --device_batch_size=4"


def test_advice_for_memory_that_a_smaller_batch_does_not_save(run: RunDir) -> None:
    failure = {
        "cause": "gpu_oom",
        "rank": 1,
        "summary": "OutOfMemoryError: CUDA out of memory",
        "phase": "checkpoint",
        "exit_code": 4,
        "where": None,
        "evidence": [],
    }
    write_json(run.failure, failure)
    told = result.diagnose([run.path])["advice"]
    assert told[0] == (
        "the memory of 'checkpoint' does not depend on device_batch_size: "
        "try ending other processes on the GPU (nvidia-smi), or a smaller model"
    )
    assert not any("--device_batch_size" in one or "is 8" in one for one in told)
    write_json(run.failure, failure | {"phase": "evaluation"})
    record = result.diagnose([run.path])
    told = record["advice"]
    assert record["phase"] == "evaluation"
    assert f"rank 1{msg('diagnose.card.in_phase', phase='evaluation')}\n" in card.draw(record)
    assert told[1] == "./launch_train.sh 2 --resume=run --device_batch_size=4"


def test_a_script_that_crashed_at_its_exit_has_not_failed(run: RunDir) -> None:
    end = {"cause": "unknown", "rank": 1, "summary": "killed by SIGABRT during teardown"}
    more = {"kind": "died", "exit_code": 134, "where": None, "evidence": [], "torn_down": True}
    write_json(run.failure, end | more)
    record = result.diagnose([run.path])
    assert (record["cause"], record["summary"]) == ("none", end["summary"])
    first, *others = card.draw(record).splitlines()
    assert first == "  no failure found (killed by SIGABRT during teardown)"
    assert "destroy_process_group()" in "".join(others)


def test_advice_for_a_log_of_a_duet_run_has_its_values(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUET_LANG", "zh")
    run.rank_log(1).write_text(
        "RuntimeError: DataLoader worker (pid(s) 3216) exited unexpectedly\n"
    )
    record = result.diagnose([run.rank_log(1)])
    assert (
        record["rank"] == 1
        and "./launch_train.sh 2 --resume=run --num_workers=0" in record["advice"]
    )


def test_the_verdict_of_the_run_precedes_its_logs(run: RunDir) -> None:
    run.rank_log(0).write_text(OOM)
    failure = {
        "cause": "hang",
        "rank": 1,
        "summary": "stuck at model.py:12",
        "where": "model.py:12",
        "evidence": ["model.py:12 (forward)"],
    }
    write_json(run.failure, failure)
    (run.checkpoints / "step_00000002").mkdir(parents=True)
    record = result.diagnose([run.path])
    assert (record["cause"], record["rank"], record["where"]) == ("hang", 1, "model.py:12")
    assert any("--resume=run" in line for line in record["advice"])


def test_all_ranks_with_the_same_error_are_named(run: RunDir) -> None:
    failure = {"cause": "exception", "rank": 1, "ranks": [0, 1], "summary": "KeyError: 'labels'"}
    write_json(run.failure, failure | {"where": "main.py:12", "evidence": []})
    record = result.diagnose([run.path])
    assert (record["rank"], record.get("ranks")) == (1, [0, 1])
    assert msg("diagnose.card.ranks", ranks="0, 1") in card.draw(record)


@pytest.mark.parametrize("inside", ["", "ranks", "ranks/rank0.log"])
def test_a_verdict_without_a_known_cause_precedes_the_logs_too(run: RunDir, inside: str) -> None:
    """A killed rank logs nothing, and the others log only its loss."""
    run.rank_log(0).write_text(
        "[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:5006.\n"
    )
    failure = {
        "cause": "killed",
        "kind": "died",
        "status": -9,
        "rank": 1,
        "summary": "killed by SIGKILL",
        "time": 1.0,
    }
    write_json(run.failure, failure | {"where": None, "evidence": []})
    record = result.diagnose([run.path / inside])
    assert (record["cause"], record["rank"], record["summary"]) == (
        "killed",
        1,
        "killed by SIGKILL",
    )
    assert "dmesg" in record["advice"][0]


def test_a_finished_script_that_trained_on_nan_is_found(run: RunDir) -> None:
    write_json(run.plan, plan() | {"script": {"path": "main.py"}})
    write_json(run.summary, {"status": "finished", "exit_code": 0, "time": 2.0})
    steps = [f"step {n}/30 loss {'nan' if n > 3 else 2.0} lr 0.1\n" for n in range(30)]
    run.rank_log(0).write_text("".join(steps))
    found = result.diagnose([run.path])
    assert (found["cause"], found["line"]) == ("nan_loss", 5)
    run.rank_log(0).write_text("".join(steps[:4]))
    assert result.diagnose([run.path])["cause"] == "none"


def test_a_run_can_be_named(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(run.summary, {"status": "stopped", "exit_code": 75, "steps": 4, "time": 2.0})
    monkeypatch.setattr(command, "EXPERIMENTS", run.path.parent)
    for words in (["--run=run"], [f"--run={run.path}"], ["run"], [str(run.path)], []):
        assert command.main(["--json", *words]) == 0
        assert json.loads(capsys.readouterr().out)["cause"] == "preempted"
    assert command.main(["--run=rum"]) == 2


def test_a_finished_run_has_no_cause(run: RunDir) -> None:
    run.rank_log(1).write_text(OOM)
    run.event("restart", cause="gpu_oom")
    write_json(run.summary, {"status": "finished", "exit_code": 0, "time": 2.0})
    record = result.diagnose([run.path])
    assert (record["cause"], record["summary"], record["advice"]) == (
        "none",
        "the run finished after 1 restart",
        [],
    )


@pytest.mark.parametrize(("code", "cause"), [(130, "interrupted"), (75, "preempted")])
def test_a_stopped_run_has_the_cause_of_its_exit_code(run: RunDir, code: int, cause: str) -> None:
    write_json(run.summary, {"status": "stopped", "exit_code": code, "steps": 4, "time": 2.0})
    assert result.diagnose([run.path])["cause"] == cause


@pytest.mark.parametrize("reader", LANGUAGES)
@pytest.mark.parametrize("writer", LANGUAGES)
@pytest.mark.parametrize("cause", ["gpu_oom", "unknown"])
def test_a_card_in_a_console_log_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str, reader: str, cause: str
) -> None:
    """A card of either language, by a reader of either language."""
    record = {
        "cause": cause,
        "kind": "died",
        "rank": 1,
        "summary": "killed by SIGKILL",
        "where": None,
        "phase": "step 8: forward",
        "waiting": {},
    }
    record |= {
        "phases": {},
        "evidence": [f"step {i} loss 1.2390" for i in range(9)],
        "advice": ["x"],
        "stacks": None,
        "log": "rank1.log",
    }
    console = tmp_path / "console.log"
    monkeypatch.setenv("DUET_LANG", writer)
    shown = card.of_run(record)
    console.write_text(
        f"[INFO] 2025-11-06 10:00:00 start\nstep 8 loss 1.3\n[ERROR] 2025-11-06 10:00:01 training "
        f"failed\n{shown}\n"
    )
    monkeypatch.setenv("DUET_LANG", reader)
    found = result.diagnose([console])
    assert (found["cause"], found["rank"], found["summary"]) == (cause, 1, "killed by SIGKILL")
    how, why = end_detection.read(console.read_text())  # of the monitor
    assert how == end_detection.FAILED and why and why.startswith(f"{cause}: ")


def test_a_folder_of_runs_is_not_one_run(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    other = RunDir(run.path.parent / "other")
    other.create()
    write_json(other.plan, plan())
    assert command.main([str(run.path.parent)]) == 2
    assert "contains 2 runs" in capsys.readouterr().err


def test_a_folder_without_logs_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "weights.pt").write_bytes(b"\0\1")
    assert command.main([str(tmp_path)]) == 2
    assert f"no log in {tmp_path}" in capsys.readouterr().err


def test_a_vanished_run_is_described_by_its_heartbeats(run: RunDir) -> None:
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    )
    write_json(
        run.supervisor,
        {"pid": int(gone.stdout), "host": socket.gethostname(), "started": time.time()},
    )
    writer = heartbeat.Heartbeat(run.heartbeat(1), 1)
    writer.step = 12
    writer.beat("backward")
    run.rank_log(1).write_text("step 11 | loss: 3.1\n")
    record = result.diagnose([run.path])
    assert record["cause"] == "unknown" and "rank 1: step 12: backward" in record["summary"]
    assert record["advice"][0].endswith(": ./launch_train.sh 2 --resume=run")
    write_json(
        run.supervisor, {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
    )
    living = result.diagnose([run.path])
    assert "--resume" not in "".join(living["advice"])
    assert living["cause"] == "none" and "rank 1: step 12: backward" in living["summary"]
    run.heartbeat(1).unlink()  # a user script has none
    assert "()" not in result.diagnose([run.path])["summary"]


def test_a_run_of_another_machine_runs_while_it_writes(run: RunDir) -> None:
    """Its processes cannot be checked, and its monotonic clock is another one."""
    write_json(run.supervisor, {"pid": os.getpid(), "host": "far", "started": time.time()})
    writer = heartbeat.Heartbeat(run.heartbeat(1), 1)
    with mock.patch.object(time, "monotonic_ns", lambda: 1):
        writer.beat("forward")
    record = result.diagnose([run.path])
    ago = msg("diagnose.run.rank_ago", rank=1, phase="step 0: forward", age_s=0)
    assert record["cause"] == "none" and ago in record["summary"]
    assert " far" in record["summary"] and "attach" not in record["summary"]
    long_ago = time.time() - standing.ELSEWHERE_S - 10
    with mock.patch.object(time, "time", lambda: long_ago):
        writer.beat("backward")
    for file in run.path.rglob("*"):
        os.utime(file, (long_ago, long_ago))
    record = result.diagnose([run.path])
    assert record["cause"] == "unknown" and " far" in record["summary"]
    assert record["advice"][0].endswith(": ./launch_train.sh 2 --resume=run")


def test_the_report_of_a_rank_precedes_the_logs_of_others(run: RunDir) -> None:
    run.rank_log(0).write_text(
        "[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:5006.\n"
    )
    error = {
        "rank": 1,
        "guilty_rank": 1,
        "time": 7.0,
        "type": "OutOfMemoryError",
        "message": "CUDA out of memory. Tried to allocate 2.00 GiB.",
    }
    write_json(run.rank_error(1), error)
    record = result.diagnose([run.path])
    assert (record["cause"], record["rank"]) == ("gpu_oom", 1) and "peer_died" in record["also"]


def test_torch_error_files_are_read(tmp_path: Path) -> None:
    """torch/distributed/elastic/multiprocessing/errors/error_handler.py writes it."""
    folder = tmp_path / "attempt_0" / "1"
    folder.mkdir(parents=True)
    message = {
        "message": "RuntimeError: CUDA error: out of memory",
        "extraInfo": {"py_callstack": "…", "timestamp": "1700000000"},
    }
    write_json(folder / "error.json", {"message": message})
    (folder / "stderr.log").write_text("ERROR: see the error file\n")
    record = result.diagnose([tmp_path])
    assert (record["cause"], record["rank"]) == ("gpu_oom", 1)
