"""Restarts: log message, records in the run directory, end of the run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.monitor_runs import look
from tests.unit.verdicts import beat_at
from training.core import heartbeat, manifest
from training.core.errors import Exit
from training.core.heartbeat import Heartbeat
from training.core.messages import msg
from training.core.rundir import RunDir, append_json, read_json, read_records, write_json
from training.launcher import failure_report, recovery_policy, script_snapshot, stop_signals
from training.launcher.outcome import Outcome
from training.launcher.recovery import Recovery
from training.tasks.gpt import memory

KILL = -signal.SIGKILL
PLACES = ("out_dir", "log_dir", "hosts", "hostfile")  # options of these


def plan(retries: int = 2, size: int = 8, workers: int = 4, **config: Any) -> dict[str, Any]:
    """Plan of two ranks with 16 sequences of 32 tokens per step."""
    load = memory.StepWorkload(
        depth=1,
        sequences=size,
        seq_len=32,
        vocab=256,
        bf16=False,
        compiled=False,
        cuda=False,
        ranks=2,
        total_tokens=512,
    )
    values = {
        "depth": 1,
        "max_seq_len": 32,
        "total_batch_size": 512,
        "device_batch_size": size,
        "num_workers": workers,
    } | config
    return {
        "config": values,
        "origins": dict.fromkeys((*values, *PLACES), "default"),
        "command": {"script": "launch_train.sh", "args": ["2"], "cwd": "/"},
        "created": 0.0,
        "place": {"node_rank": 0, "nnodes": 1},
        "ranks": 2,
        "local_ranks": 2,
        "device": {"value": "cpu", "reason": "as asked"},
        "gpus": [],
        "launch": "a1b2",
        "retries": {"value": retries, "reason": "as asked"},
        "batch": {
            "device_sequences": size,
            "seq_len": 32,
            "world_size": 2,
            "accumulation": 8 // size,
        },
        "device_batch_size": {"value": size, "reason": "as asked"},
        "activation_checkpointing": {"value": 0, "reason": f"not needed, {size} sequences fit"},
        "selective_checkpointing": {"value": 0, "reason": f"not needed, {size} sequences fit"},
        "loss_chunks": {"value": 1, "reason": "as asked"},
        "text": [],
        "notes": [],
        "static_graph": {"value": False, "reason": "not asked for"},
        "memory": memory.estimate(load).record() | {"free_bytes": 1 << 30, "load": vars(load)},
    }


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run with a complete checkpoint of step 20, whose ranks were in step 23."""
    monkeypatch.setenv("DUET_ATTEMPT", "")  # removed at the end of the test
    made = RunDir(tmp_path / "run")
    made.create()
    facts = dict.fromkeys(manifest.KEYS, 0) | {"step": 20}
    folder = made.checkpoints / manifest.folder_name(20)
    folder.mkdir()
    manifest.write(folder, {k: v for k, v in facts.items() if k not in ("format", "own_sha256")})
    beat_at(made, 23)
    return made


def record(**facts: Any) -> dict[str, Any]:
    shown = {
        "cause": "unknown",
        "kind": "died",
        "rank": 1,
        "status": KILL,
        "step": 23,
        "phase": "step 23: forward",
        "where": None,
    }
    return shown | {"summary": "killed by SIGKILL", "time": 0.0} | facts


def test_a_restart_is_logged_and_recorded_with_its_cost(
    run: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    tried = Recovery(run, plan())
    assert os.environ["DUET_ATTEMPT"] == "1"
    write_json(run.failure, {"cause": "unknown"})
    assert tried.again(record(), Outcome())
    logged = capfd.readouterr().err
    assert (
        "rank 1 failed in 'step 23: forward': killed by SIGKILL; restarting from step 20 (1 of 2), "
        "3 steps lost\n" in logged
    )
    assert logged.count("[") == logged.count("[WARNING]") == 1, "one message"
    (event,) = read_records(run.events)
    assert 0 <= event.pop("seconds_lost") < 5 and event.pop("time")
    assert event == {
        **{"event": "restart", "attempt": 2, "cause": "unknown", "kind": "died", "rank": 1},
        **{"step": 23, "resumes_at": 20, "steps_lost": 3, "changes": {}},
        "text": "killed by SIGKILL at step 23: restarted from step 20",
    }
    assert os.environ["DUET_ATTEMPT"] == "2"
    assert not run.failure.exists()


def test_the_clock_of_another_machine_on_the_same_disk_does_not_count(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time", lambda: real() + 300)
        other = Heartbeat(run.heartbeat(1), 1)
        other.beat("forward")
    two = plan() | {"local_ranks": 1, "place": {"node_rank": 0, "nnodes": 2}}
    assert Recovery(run, two).again(record(), Outcome())
    assert 0 <= next(read_records(run.events))["seconds_lost"] < 5


def test_the_message_of_a_restart_names_the_snapshot_of_memory(
    run: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    file = "/runs/rank1.memory.pickle"
    memory = {"allocated_bytes": 1, "reserved_bytes": 1, "largest_free_bytes": 1, "largest": []}
    of = record(kind="error", cause="gpu_oom", memory={**memory, "file": file})
    assert Recovery(run, plan()).again(of, Outcome())
    assert capfd.readouterr().err.count(file) == 1


@pytest.mark.parametrize(
    ("launch", "kept"), [("a1b2", False), ("before", True)], ids=["this start", "an earlier one"]
)
def test_the_summary_of_a_failed_start_is_not_the_end(run: RunDir, launch: str, kept: bool) -> None:
    """Rank 0 had written it when it failed. That of a resumed run stays until there is a step."""
    write_json(run.summary, {"status": "done", "launch": launch})
    assert Recovery(run, plan()).again(record(), Outcome())
    assert run.summary.exists() == kept


def test_recovery_is_recorded_once(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    tried = Recovery(run, plan())
    tried.again(record(), Outcome())
    beat_at(run, 0, "building the model")
    tried.look()
    beat_at(run, 21)
    tried.look()
    assert not [r for r in read_records(run.events) if r["event"] == "recovered"], (
        "the first step is not complete yet"
    )
    writer = Heartbeat(run.heartbeat(0), 0)
    for writer.step in (21, 22):
        writer.beat("forward")
    tried.look()
    tried.look()
    (event,) = (r for r in read_records(run.events) if r["event"] == "recovered")
    assert (event["attempt"], event["step"]) == (2, 21) and 0 <= event["seconds"] < 5
    assert capfd.readouterr().err.count("training resumed 0.") == 1


def test_a_completed_last_step_counts_too(run: RunDir) -> None:
    tried = Recovery(run, plan())
    tried.again(record(), Outcome())
    writer = Heartbeat(run.heartbeat(0), 0)
    writer.step = 21
    writer.beat("record")
    writer.beat(heartbeat.FINISHED)
    tried.finish()
    assert [r["event"] for r in read_records(run.events)] == ["restart", "recovered"]


def test_the_end_of_the_run_lists_every_restart(run: RunDir) -> None:
    tried = Recovery(run, plan(retries=5))
    assert tried.finish() == ""
    assert tried.again(record(cause="gpu_oom", kind="error", step=22), Outcome())
    assert tried.again(record(), Outcome())
    write_json(run.summary, {"steps": 60})
    assert tried.finish() == " after 2 restarts (gpu_oom at step 22; killed by SIGKILL at step 23)"
    summary = read_json(run.summary) or {}
    assert summary["steps"] == 60
    assert [(r["cause"], r["step"], r["changes"]) for r in summary["restarts"]] == [
        ("gpu_oom", 22, {"device_batch_size": [8, 4]}),
        ("unknown", 23, {}),
    ]


def test_a_change_is_in_the_plan_that_the_ranks_read(
    run: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    held = plan()
    write_json(run.plan, held)
    assert Recovery(run, held).again(record(cause="gpu_oom", kind="error"), Outcome())
    written = read_json(run.plan) or {}
    assert written["config"]["device_batch_size"] == held["config"]["device_batch_size"] == 4
    (event,) = read_records(run.events)
    assert event["text"] == "gpu_oom at step 23: restarted from step 20, device_batch_size 8 → 4"
    assert (
        "restarting from step 20, 3 steps lost, with device_batch_size 8 → 4"
        in capfd.readouterr().err
    )


def test_the_reason_for_no_restart(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    write_json(run.failure, {"cause": "unknown"})
    tried = Recovery(run, plan())
    assert not tried.again(record(kind="error", status=1), Outcome())
    why = "not restarted: the same exception would recur"
    assert tried.given_up == why and not capfd.readouterr().err
    assert [r["text"] for r in read_records(run.events)] == [why]
    assert run.failure.exists()
    assert tried.again(record(), Outcome())
    assert not tried.again(record(), Outcome())
    assert tried.given_up == "given up: second failure at step 23"


def test_no_restart_after_a_stop_request(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    assert not Recovery(run, plan()).again(record(), Outcome(asked=Exit.PREEMPTED))
    assert capfd.readouterr().err == "" and not list(read_records(run.events))


def test_a_script_is_restarted_even_if_the_search_for_its_checkpoints_fails(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(script_snapshot, "search", fails)
    script = {"path": "fit.py", "args": [], "python": None, "python_reason": "", "module": False}
    made = plan() | {"script": script, "command": {"cwd": str(run.path)}, "created": 0.0}
    assert Recovery(run, made).again(record(), Outcome())  # type: ignore[arg-type]
    text = "restarting the script (1 of 2): the search for its checkpoints failed"
    assert f"{text} (RecursionError: too deep)" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_a_stop_signal_in_a_pause(
    run: RunDir,
    handlers: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
) -> None:
    """failure.json has the request, not the failure before it: else the monitor shows `died`."""
    monkeypatch.setattr(recovery_policy, "PAUSES_S", (3600.0,))
    select = stop_signals.select.select
    monkeypatch.setattr(
        stop_signals.select, "select", lambda *args: (os.kill(os.getpid(), number), select(*args))
    )
    write_json(run.failure, {"cause": "peer_died"})
    tried = Recovery(run, plan())
    assert not tried.again(record(cause="peer_died", kind="error"), Outcome())
    assert tried.stopped == code
    assert signal.getsignal(number) == signal.SIG_IGN, "the run ends undisturbed"
    logged = capfd.readouterr().err
    assert "restarting from step 20 (1 of 2) in 3600 s, 3 steps lost" in logged
    text = f"{stop_signals.name(number)}: stopped before the restart; step 20 is saved"
    assert f"{text} (exit {code})\n" in logged
    known = read_json(run.failure) or {}
    assert (known["kind"], known["summary"], known["exit_code"]) == ("asked", text, code)
    assert known["cause"] == ("interrupted" if code == Exit.INTERRUPTED else "preempted")
    write_json(run.plan, tried.plan)
    assert look(run)["run"]["state"] == "stopped"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_a_stop_signal_while_the_ranks_of_a_failed_attempt_end(
    run: RunDir, capfd: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    """As in the pause after it: SLURM requeues the job."""
    write_json(run.failure, {"cause": "unknown"})
    tried = Recovery(run, plan())
    outcome = Outcome(asked=Exit(code), guilty=(1, KILL), late_stop=number)
    assert not tried.again(record(), outcome)
    assert (tried.stopped, tried.given_up, tried.attempt) == (code, "", 1)
    known = read_json(run.failure) or {}
    assert (known["kind"], known["exit_code"]) == ("asked", code)
    name = stop_signals.name(number)
    assert f"{name}: stopped before the restart; step 20 is saved" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("facts", "retries", "found"),
    [
        ({}, 0, {}),
        ({"kind": "error", "status": 1}, 2, {}),
        ({}, 2, {"killed": True}),
        ({}, 2, {"forced": True}),
        ({}, 2, {"blocked": "rank 1 does not end"}),
    ],
)
def test_without_a_restart_a_late_stop_signal_changes_nothing(
    run: RunDir, facts: dict[str, Any], retries: int, found: dict[str, Any]
) -> None:
    write_json(run.failure, {"cause": "unknown"})
    tried = Recovery(run, plan(retries))
    outcome = Outcome(asked=Exit.PREEMPTED, late_stop=signal.SIGTERM, **found)
    assert not tried.again(record(**facts), outcome)
    assert (tried.stopped, tried.given_up) == (None, "")
    assert read_json(run.failure) == {"cause": "unknown"} and not list(read_records(run.events))


# ── on several machines
# ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_rank_of_another_machine_that_cannot_be_killed_ends_the_run(run: RunDir) -> None:
    there: Any = plan() | {"place": {"node_rank": 1, "nnodes": 2}}
    found = Outcome(guilty=(1, KILL), here=(1, KILL), blocked="rank 1 does not end")
    sent = failure_report.of_node(found, run, there)
    assert sent["blocked"] == "rank 1 does not end"
    tried = Recovery(run, plan())
    assert tried.choose(sent, Outcome(guilty=(1, KILL), elsewhere=True)) is None
    assert tried.given_up == msg("launcher.restart.not_restarted", reason=sent["blocked"])


@pytest.mark.parametrize("shared", [True, False])
def test_another_machine_changes_its_own_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """On a shared disk the plan of the ranks belongs to node 0."""
    monkeypatch.setenv("DUET_ATTEMPT", "")
    run, own = RunDir(tmp_path / "run", 1), plan() | {"shared": shared}
    own["place"] = {"node_rank": 1, "nnodes": 2}
    run.create()
    write_json(run.own_plan, own)
    write_json(run.plan, plan() if shared else own)
    write_json(run.failure, {"cause": "gpu_oom"})
    Recovery(run, own).follow(
        {
            "changes": {"device_batch_size": 4, "data": "/etc"},
            "why": "rank 1 was out of memory with 8",
        },
        record(),
    )
    sizes = [
        (read_json(path) or {})["config"]["device_batch_size"] for path in (run.own_plan, run.plan)
    ]
    assert sizes == [4, 8 if shared else 4]
    assert "data" not in own["config"], "a message from the network changes nothing else"
    assert os.environ["DUET_ATTEMPT"] == "2" and not run.failure.exists()


def test_a_stop_while_restarted_ranks_start_names_what_is_saved(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Outcome(asked=Exit.INTERRUPTED, guilty=(0, -signal.SIGINT))
    made = plan() | {"command": {"script": "launch_train.sh", "args": ["2"]}}
    made["origins"] |= dict.fromkeys(("out_dir", "log_dir", "hosts", "hostfile"), "default")
    summaries = []
    for attempt in ("1", "2"):
        monkeypatch.setenv("DUET_ATTEMPT", attempt)
        found = failure_report.failure(outcome, run, made)  # type: ignore[arg-type]
        assert (found["kind"], found["exit_code"]) == ("asked", 130)
        summaries.append("20" in found["summary"])
    assert summaries == [False, True]


def test_the_restarts_of_this_launch_are_taken_over_whatever_the_clocks(run: RunDir) -> None:
    for attempt in (2, 3, 2, 3, 4):  # two launches of a machine whose clock is behind
        made = {"attempt": attempt, "text": f"to {attempt}"}
        append_json(run.events, {"time": 1.0, "event": "restart", **made})
    other = RunDir(run.path, 1)
    for attempt, expected in ((4, [2, 3, 4]), (1, [])):
        recovery = Recovery(other, plan() | {"created": 1e12})  # type: ignore[arg-type]
        recovery._attempt = attempt
        recovery.take_over(run)
        assert [one["attempt"] for one in recovery.restarts] == expected
