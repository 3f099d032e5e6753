"""The notification after a run, by real programs, however they behave."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TOKEN, wait_until
from training.core import log as console
from training.core.errors import Exit
from training.core.project import ROOT
from training.core.rundir import RunDir, append_json, write_json
from training.launcher import notification, post_run
from training.launcher.post_run import PostRun

TEXTS = "'$(touch pwned)'; \"`touch pwned`\"\n--x $HOME %s 训练"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "a run")
    made.create()
    write_json(made.plan, {})
    return made


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(console, "_log", None)
    console.open_log(tmp_path / "run.log")
    return tmp_path / "run.log"


def plan(notify: str = "", *, report: bool = False, **more: Any) -> dict[str, Any]:
    config = {"notify": notify, "report": report, "tokenizer": "bytes"}
    facts = {
        "created": time.time() - 75,
        "ranks": 2,
        "data": {"name": "stdlib"},
        "device": {"value": "cpu"},
        "log_file": "/logs/x.log",
    }
    return {"config": config, **facts, **more}


def notify(run: RunDir, command: str, code: int = 0, why: str = "") -> None:
    end = PostRun(run, plan(command))
    end.begun = not why
    end.close(code, why)


def finished(run: RunDir) -> None:
    facts = {
        "steps": 12,
        "tokens": 3_000_000,
        "seconds": 75.0,
        "loss_first": 5.5,
        "loss_last": 2.1,
        "val_bpb_first": 4.5,
        "bytes_per_token": 1.0,
    }
    write_json(run.summary, {"status": "done", "val_bpb_last": 4.0, **facts})
    append_json(run.metrics, {"step": 11, "loss": 2.2})
    append_json(run.metrics, {"step": 12, "loss": 2.1})
    run.event("eval", step=12, val_loss=2.0, val_bpb=4.0)


def failed(run: RunDir, **more: Any) -> None:
    record = {
        "cause": "gpu_oom",
        "kind": "error",
        "rank": 1,
        "summary": "OutOfMemoryError: 20 GiB",
        "advice": ["--device_batch_size=4"],
    }
    write_json(run.failure, record | more)


def test_the_command_gets_the_facts_as_data(
    run: RunDir, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    finished(run)
    run.report.write_text("<html>")
    notify(run, f"cat > {tmp_path}/facts; env > {tmp_path}/env; pwd > {tmp_path}/where")
    facts = json.loads((tmp_path / "facts").read_text())
    assert (facts["name"], facts["status"], facts["exit_code"], facts["cause"], facts["rank"]) == (
        "a run",
        "finished",
        0,
        None,
        None,
    )
    assert (facts["steps"], facts["loss"], facts["eval"]) == (
        12,
        2.1,
        {"val_loss": 2.0, "val_bpb": 4.0},
    )
    assert 75 <= facts["seconds"] < 100 and facts["restarts"] == 0
    assert (facts["report"], facts["run_dir"], facts["log"]) == (
        str(run.report),
        str(run.path),
        "/logs/x.log",
    )
    assert facts["title"] == "a run finished"
    assert facts["text"].startswith(
        "12 steps, 3.00 M tokens of stdlib in 1 min 15 s, 2 × cpu; loss 7.935 → 3.030 bits/byte; "
        "validation"
    )
    env = dict(
        line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line
    )
    expected = {
        "STATUS": "finished",
        "EXIT_CODE": "0",
        "RUN_NAME": "a run",
        "RUN_DIR": str(run.path),
        "REPORT": str(run.report),
    }
    expected |= {"TITLE": facts["title"], "TEXT": facts["text"]}
    assert {name: env[f"DUET_{name}"] for name in expected} == expected
    assert Path((tmp_path / "where").read_text().strip()) == Path.cwd()
    assert capfd.readouterr().err == "", "nothing is logged on success"


def test_the_last_evaluation_is_further_back_than_many_steps(run: RunDir) -> None:
    run.event("eval", step=1, val_loss=3.0)
    run.event("eval", step=2, val_loss=2.0)
    for step in range(3, 9):
        append_json(run.metrics, {"step": step, "loss": step / 2, "compute_ms": [1.25] * 9999})
    facts = notification.payload(run, plan(), 0, begun=True)
    assert (facts["steps"], facts["loss"], facts["eval"]) == (8, 4.0, {"val_loss": 2.0})


def test_no_part_of_the_facts_is_executed(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failed(run, summary=TEXTS, cause="unknown")
    notify(run, 'printf "%s" "$DUET_TEXT" > text', 4)
    assert (
        tmp_path / "text"
    ).read_text() == "rank 1: '$(touch pwned)'; \"`touch pwned`\" --x $HOME %s 训练 (exit 4)"
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("code", "record", "status", "title"),
    [
        (Exit.TRAINING, {}, "failed", "a run failed: gpu_oom"),
        (Exit.HANG, {"cause": "hang"}, "failed", "a run failed: hang"),
        (Exit.PREEMPTED, {"cause": "preempted", "kind": "asked"}, "preempted", "a run preempted"),
        (Exit.TRAINING, {"cause": "preempted", "kind": "asked"}, "preempted", "a run preempted"),
        (
            Exit.INTERRUPTED,
            {"cause": "interrupted", "kind": "asked"},
            "stopped",
            "a run stopped on request",
        ),
        (143, {"cause": "preempted", "kind": "asked"}, "preempted", "a run preempted"),
        (134, {"cause": "unknown"}, "failed", "a run failed: unknown"),
        (134, {"cause": "unknown", "torn_down": True}, "finished", "a run finished"),
        (Exit.LEFT, {"cause": "exit_status"}, "failed", "a run failed: exit_status"),  # of curl
    ],
)
def test_status_and_title(
    run: RunDir, code: int, record: dict[str, Any], status: str, title: str
) -> None:
    failed(run, **record)
    facts = notification.payload(run, plan(), code, begun=True)
    assert (facts["status"], facts["title"], facts["exit_code"]) == (status, title, code)
    assert facts["text"].endswith(f"(exit {code})")
    assert (facts["cause"], facts["rank"]) == (
        (record.get("cause", "gpu_oom"), 1) if status == "failed" else (None, None)
    )


PRINTED = {"step": 30, "loss": 0.0333, "eval_name": "val_loss", "eval": 0.5}


def test_result_of_a_script(run: RunDir) -> None:
    done = {"status": "finished", "ranks": 2, "seconds": 17.93, "figures": PRINTED}
    write_json(run.summary, done)
    facts = notification.payload(run, plan(), 0, begun=True)
    assert facts["text"] == "2 ranks, 17.9 s, step 30, loss 0.0333, val_loss 0.5"
    assert (facts["steps"], facts["loss"], facts["eval"]) == (30, 0.0333, {"val_loss": 0.5})
    run.summary.unlink()
    failed(run, figures=PRINTED | {"eval": None})
    facts = notification.payload(run, plan(), 4, begun=True)
    assert (facts["steps"], facts["loss"], facts["eval"]) == (30, 0.0333, None)


def test_a_machine_that_leaves_notifies_only_if_perhaps_no_other_continues(run: RunDir) -> None:
    command = f"cat > {shlex.quote(str(run.path))}/facts"
    end = PostRun(RunDir(run.path, 1), plan(command))
    end.leave()
    end.close(Exit.LEFT)
    assert not (run.path / "facts").exists()
    end.leave("a reason")
    end.close(Exit.LEFT)
    facts = json.loads((run.path / "facts").read_text())
    assert (facts["status"], facts["title"], facts["text"], facts["exit_code"]) == (
        "left",
        "a run may have ended",
        "a reason (exit 6)",
        6,
    )


@pytest.mark.parametrize("step_s", [-3600, 3600])
def test_the_seconds_of_a_launch_during_which_the_clock_was_set(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    end, clock = PostRun(run, plan(f"cat > {shlex.quote(str(run.path))}/facts")), time.time
    monkeypatch.setattr("time.time", lambda: clock() + step_s)
    end.close(0)
    facts = json.loads((run.path / "facts").read_text())
    assert 75 <= facts["seconds"] < 1000


def test_stopped_between_two_attempts(run: RunDir) -> None:
    facts = notification.payload(run, plan(), Exit.PREEMPTED, begun=True)
    assert (facts["status"], facts["text"]) == ("preempted", "no checkpoint yet (exit 75)")


def test_stopped_with_a_checkpoint(run: RunDir) -> None:
    finished(run)
    facts = notification.payload(run, plan(), Exit.INTERRUPTED, begun=True)
    assert facts["status"] == "stopped" and facts["text"].startswith(
        "stopped at step 12, checkpoint saved; 12 steps"
    )


def test_refused_data_of_a_resumed_run_reports_nothing_of_earlier_starts(
    run: RunDir, tmp_path: Path
) -> None:
    finished(run)
    failed(run)
    run.report.write_text("old")
    notify(run, f"cat > {tmp_path}/facts", Exit.CONFIG, "data is 'x' (…): no text in it")
    facts = json.loads((tmp_path / "facts").read_text())
    assert (facts["status"], facts["text"]) == ("failed", "data is 'x' (…): no text in it (exit 2)")
    assert (facts["cause"], facts["steps"], facts["loss"], facts["eval"], facts["report"]) == (
        None,
    ) * 5


def test_a_resumed_run_reports_nothing_of_its_earlier_end(run: RunDir) -> None:
    finished(run)
    for file in (run.summary, run.metrics):
        os.utime(file, (1, 1))
    failed(run)
    assert (
        "CUDA" not in notification.payload(run, plan(), 4, begun=True)["text"]
        and notification.payload(run, plan(), 4, begun=True)["status"] == "failed"
    )
    run.failure.unlink()
    assert (
        notification.payload(run, plan(), 75, begun=True)["text"] == "no checkpoint yet (exit 75)"
    )


def test_notification_of_a_withdrawn_run(tmp_path: Path) -> None:
    notify(RunDir(tmp_path / "withdrawn"), f"cat > {tmp_path}/facts", Exit.CONFIG, "no text")
    assert json.loads((tmp_path / "facts").read_text())["run_dir"] is None
    assert not (tmp_path / "withdrawn").exists()


def test_the_error_report_of_a_single_rank_without_a_supervisor(run: RunDir) -> None:
    write_json(
        run.rank_error(0), {"type": "OutOfMemoryError", "message": "CUDA out of memory", "rank": 0}
    )
    facts = notification.payload(run, plan(), 1, begun=True)
    assert (facts["status"], facts["cause"], facts["text"]) == (
        "failed",
        "gpu_oom",
        "rank 0: OutOfMemoryError: CUDA out of memory (exit 1)",
    )


def test_facts_contain_no_secrets(run: RunDir) -> None:
    failed(
        run,
        summary="ConnectionError: https://me:geheim@host/ token=geheim1234",
        advice=["curl -H 'Authorization: Bearer geheim1234'"],
    )
    assert "geheim" not in json.dumps(notification.payload(run, plan(), 4, begun=True))


def test_output_of_the_command_is_in_the_log_alone(
    run: RunDir, log: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    notify(run, "echo sent; echo 'Authorization: Bearer geheim1234' >&2")
    assert log.read_text() == "notify: sent\nnotify: Authorization: …\n"
    assert capfd.readouterr().err == ""


def test_a_failure_of_the_command_is_one_warning(
    run: RunDir, log: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    notify(run, "echo first; echo 'curl: (6) no such host' >&2; exit 6")
    logged = capfd.readouterr().err
    assert logged.count("[WARNING]") == 1 == logged.count("\n")
    assert logged.endswith("--notify failed: exited with status 6: curl: (6) no such host\n")
    assert "notify: first\n" in log.read_text()


def test_a_missing_program(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    notify(run, "no-such-program-here")
    assert "status 127" in capfd.readouterr().err


def test_no_shell(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(post_run, "SHELL", "/no/sh")
    notify(run, "true")
    assert (
        "--notify failed: /no/sh cannot be started: No such file or directory"
        in capfd.readouterr().err
    )


def test_a_slow_command_is_killed_with_all_its_processes(
    run: RunDir, token: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also those in a session of their own; the token fixture looks for leftover processes."""
    monkeypatch.setattr(post_run, "NOTIFY_S", 0.5)
    monkeypatch.setenv(TOKEN, token)
    begun = time.monotonic()
    notify(run, "trap '' TERM; sleep 1000 & setsid sleep 1000 & echo waiting; sleep 1000")
    assert time.monotonic() - begun < 10
    assert "--notify failed: not finished within 0.5 s: killed: waiting\n" in capfd.readouterr().err


def test_background_processes_of_the_command_are_not_waited_for(
    run: RunDir, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, token)
    begun = time.monotonic()
    notify(run, "sleep 1000 & setsid sleep 1000 & true")
    assert time.monotonic() - begun < 10


def test_endless_output_is_bounded(
    run: RunDir, log: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(post_run, "NOTIFY_S", 0.5)
    notify(run, "yes 'all is well'")
    assert "not finished within 0.5 s" in capfd.readouterr().err
    assert log.stat().st_size < 200_000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_skips_the_command(
    run: RunDir, tmp_path: Path, token: str, number: signal.Signals
) -> None:
    """In its own process, as the supervisor: it continues with its exit status."""
    code = f"""
        import sys
        sys.path[:0] = [{str(ROOT)!r}]
        from tests.unit.test_launch_ending import plan
        from training.launcher.post_run import PostRun
        from training.core.rundir import RunDir
        end = PostRun(RunDir({str(run.path)!r}), plan("touch '{tmp_path}/begun'; sleep 1000"))
        end.close(4)
        sys.exit(4)
    """
    env = {**os.environ, TOKEN: token}
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, stderr=subprocess.PIPE, text=True
    )
    wait_until((tmp_path / "begun").exists)
    child.send_signal(number)
    _, logged = child.communicate(timeout=20)
    assert child.returncode == 4
    assert (
        f"--notify failed: {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'}: killed\n" in logged
    )


def test_a_killed_supervisor_leaves_no_process(run: RunDir, tmp_path: Path, token: str) -> None:
    code = f"""
        import sys
        sys.path[:0] = [{str(ROOT)!r}]
        from tests.unit.test_launch_ending import plan
        from training.launcher.post_run import PostRun
        from training.core.rundir import RunDir
        PostRun(RunDir({str(run.path)!r}), plan("setsid sleep 1000 & touch '{tmp_path}/begun'; sleep 1000")).close(0)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, TOKEN: token}
    )
    wait_until((tmp_path / "begun").exists)
    child.kill()
    assert child.wait() == -signal.SIGKILL
