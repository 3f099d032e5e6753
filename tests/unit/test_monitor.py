"""State of a run as the monitor reads it from a run directory."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.monitor_runs import ROOT, Made, dead_pid, look, old, text_of
from training.core import heartbeat, rundir
from training.monitor import host_stats, run_list, screen
from training.monitor.runs import facts
from training.monitor.screen import View
from training.watchdog.probes import procfs


def test_planned_only(made: Made) -> None:
    seen = look(made.run)
    assert (seen["run"]["state"], seen["progress"]["total_steps"], seen["progress"]["eta_s"]) == (
        "starting",
        400,
        None,
    )
    assert seen["run"]["reason"].startswith("no rank yet")  # planned a while ago
    assert [r["phase"] for r in seen["ranks"]] == [None, None]
    assert "no heartbeat yet" in text_of(made.run)


@pytest.mark.parametrize(
    ("pid", "host", "expected"),
    [
        (os.getpid(), os.uname().nodename, "starting"),
        (None, os.uname().nodename, "died"),
        (None, "another-machine", "starting"),
    ],
    ids=["the launch script runs", "it has ended", "on another machine"],
)
def test_a_plan_whose_launch_script_has_ended_never_starts(
    tmp_path: Path, pid: int | None, host: str, expected: str
) -> None:
    starter = {"pid": pid or dead_pid(), "host": host}
    run = Made(tmp_path / "experiments/run", age_s=1, starter=starter).run
    seen = look(run)["run"]
    assert (seen["state"], facts.read(run.path).state) == (expected, expected)
    # that of its plan: an alert ends some time after the end
    assert (seen["ended_unix_s"] == seen["started_unix_s"]) == (expected == "died")


def test_starting_shows_what_each_rank_is_doing(made: Made) -> None:
    made.supervisor(os.getpid()).beats("loading torch", step=0, ranks=[0])
    seen = look(made.run)
    assert (seen["run"]["state"], seen["run"]["reason"]) == ("starting", None)
    shown = text_of(made.run)
    assert "loading torch" in shown and "no heartbeat yet" in shown and "STARTING" in shown


def test_running(made: Made) -> None:
    seen = look(made.supervisor(os.getpid()).steps(100).beats("forward", step=101).run)
    assert seen["run"]["state"] == "running"
    progress, training = seen["progress"], seen["training"]
    assert (progress["step"], progress["total_steps"], progress["percent"], progress["epochs"]) == (
        100,
        400,
        25.0,
        1,
    )
    assert progress["eta_s"] == pytest.approx(
        300 * 0.1, abs=10
    )  # less the time since its last step
    assert progress["elapsed_s"] == pytest.approx(100, abs=5)
    assert training["loss"] == pytest.approx(2 + 3 * math.exp(-100 / 30))
    assert (training["eval_best"], training["eval_best_step"], training["eval_last"]) == (
        2.0,
        100,
        2.0,
    )
    assert (training["step_ms_median"], training["step_ms_p95"], training["tokens_per_s"]) == (
        105.0,
        109.0,
        38000.0,
    )
    assert [(r["doing"], r["alive"], r["late"]) for r in seen["ranks"]] == [
        ("step 101: forward", True, False)
    ] * 2


def test_the_loss_is_shown_in_the_unit_of_the_evaluations(made: Made) -> None:
    """Recorded in nats per token, with two bytes per token."""
    made.supervisor(os.getpid()).steps(100).beats("forward", step=101)
    rundir.write_json(
        made.run.data, (rundir.read_json(made.run.data) or {}) | {"bytes_per_token": 2.0}
    )
    seen = look(made.run)
    recorded = 2 + 3 * math.exp(-100 / 30)
    shown = f"{recorded / math.log(2) / 2:.4f}"
    assert (seen["training"]["loss"], seen["training"]["loss_unit"]) == (
        pytest.approx(recorded),
        "nats/token",
    )
    assert f"loss {shown} bits/byte" in text_of(made.run) and "val 2.0000 bits/byte" in text_of(
        made.run
    )
    assert f"loss {shown} bits/byte  val 2.0000 bits/byte" in screen.one_line(seen)
    rows = run_list.screen(run_list.RunTable(made.run.path.parent).read(), View(120, 30))
    assert any(f"{shown}   2.0000" in row for row in rows), rows


def test_scores_of_averaged_weights_are_marked(made: Made) -> None:
    """Each evaluation by itself: a resume may begin or drop the average."""
    made.supervisor(os.getpid()).steps(100).beats("forward", step=101)
    for step, more, marked in ((101, {"weights": "ema"}, True), (102, {}, False)):
        made.step(step, 2.0)
        scores = {"time": time.time(), "step": step, "epoch": 1, "val_bpb": 1.5, "eval_ms": 9.0}
        rundir.append_json(made.run.metrics, {**scores, **more})
        assert look(made.run)["training"]["eval_averaged"] is marked
        assert ("averaged weights" in text_of(made.run)) is marked


def test_finished(made: Made) -> None:
    made.supervisor(dead_pid()).steps().beats(heartbeat.FINISHED, 400).summary()
    seen = look(made.run)
    assert (seen["run"]["state"], seen["run"]["reason"], seen["progress"]["eta_s"]) == (
        "finished",
        None,
        None,
    )
    shown = text_of(made.run)
    assert (
        "FINISHED" in shown
        and "done: loss 7.935 → 3.030 bits/byte · validation 3.5000 → 1.8700 bits/byte" in shown
    )


def test_the_log_of_an_archived_run_is_on_another_machine(made: Made) -> None:
    made.log.write_text("of this machine\n")
    assert look(made.run)["log"] == {"file": str(made.log), "last_lines": ["of this machine"]}
    rundir.write_json(made.run.archived, {})
    assert look(made.run)["log"] == {"file": None, "last_lines": []}


def test_failed(made: Made) -> None:
    made.supervisor(dead_pid()).steps().beats().failure()
    seen = look(made.run)
    assert (seen["run"]["state"], seen["failure"]["cause"]) == ("failed", "gpu_oom")
    shown = text_of(made.run)
    assert (
        "gpu_oom on rank 1: CUDA out of memory" in shown
        and "step 7: forward in model.py:12" in shown
        and "try: --device_batch_size=8" in shown
    )


def test_a_script_that_crashed_at_its_exit_has_finished(made: Made) -> None:
    made.failure(torn_down=True, exit_code=134, summary="killed by SIGABRT during teardown")
    run, row = look(made.run)["run"], facts.read(made.run.path)
    assert (run["state"], run["reason"]) == (row.state, row.reason)
    assert (run["state"], run["reason"], run["exit_code"]) == (
        "finished",
        "killed by SIGABRT during teardown",
        134,
    )
    assert run["ended_unix_s"] is not None


def test_stopped_at_once_is_not_a_failure(made: Made) -> None:
    """Ctrl-C twice."""
    made.supervisor(dead_pid()).steps()
    rundir.write_json(
        made.run.failure,
        {
            "kind": "asked",
            "cause": "interrupted",
            "summary": "stopped on request at once",
            "exit_code": 130,
        },
    )
    seen = look(made.run)
    assert (seen["run"]["state"], seen["run"]["reason"], seen["run"]["exit_code"]) == (
        "stopped",
        "stopped on request at once",
        130,
    )
    assert seen["failure"] is None and "STOPPED" in text_of(made.run)


def test_died(made: Made) -> None:
    """All processes killed with -9, which leaves no record."""
    writer = (
        "import sys; from training.core.heartbeat import Heartbeat; h = "
        "Heartbeat(sys.argv[1], 0); h.step = 9; h.beat('forward')"
    )
    subprocess.run([sys.executable, "-c", writer, str(made.run.heartbeat(0))], cwd=ROOT, check=True)
    made.supervisor(dead_pid()).steps()
    seen = look(made.run)
    assert seen["run"]["state"] == "died" and "gone" in seen["run"]["reason"]
    assert [r["alive"] for r in seen["ranks"]] == [False, False]
    assert seen["ranks"][0]["doing"] == "step 9: forward"


def test_one_live_rank_keeps_the_run_running(made: Made) -> None:
    """Started without a supervisor, or the supervisor was killed and the rank has not noticed
    yet."""
    made.supervisor(dead_pid(), rank_pid=os.getpid()).steps()
    assert look(made.run)["run"]["state"] == "running"


def test_torchrun_is_the_only_known_process(made: Made) -> None:
    rundir.write_json(
        made.run.supervisor,
        {"pid": dead_pid(), "started": made.at + 1, "ranks": [{"rank": None, "pid": os.getpid()}]},
    )
    assert look(made.run)["run"]["state"] == "starting"


def test_failed_query_does_not_mark_a_process_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(pid: int) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("psutil.Process", fails)
    now = time.time()
    assert host_stats.alive({"pid": os.getpid()}, now)
    assert not host_stats.alive({"pid": 2**22 + 1}, now)


def test_zombie_is_not_alive(made: Made) -> None:
    process = subprocess.Popen(["true"])
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, not reaped
        made.supervisor(process.pid)
        assert look(made.run)["run"]["state"] == "died"
    finally:
        process.wait()


def test_reused_pid_is_not_alive(made: Made) -> None:
    made.supervisor(os.getpid())
    old(made.run.supervisor, 10**6)  # written long before this process started
    assert look(made.run)["run"]["state"] == "died"


def test_a_clock_that_was_set_forward_ends_no_run(made: Made) -> None:
    """After a virtual machine was suspended, its files are older than its processes."""
    own = {"pid": os.getpid(), "ticks": procfs.began(os.getpid())}
    known = own | {"started": made.at + 1, "ranks": [own | {"rank": rank} for rank in (0, 1)]}
    rundir.write_json(made.run.supervisor, known)
    old(made.run.supervisor, 10**6)
    seen = look(made.run)
    assert seen["run"]["state"] == "starting" and all(rank["alive"] for rank in seen["ranks"])
    rundir.write_json(made.run.supervisor, known | {"ticks": own["ticks"] - 1, "ranks": []})
    assert look(made.run)["run"]["state"] == "died", "a later process with the same pid"


def test_resumed_run_has_not_ended(made: Made) -> None:
    """summary.json, failure.json, supervisor.json and heartbeats of the first start are older than
    the plan of the second."""
    made.steps(60).beats(heartbeat.FINISHED).summary().failure().supervisor(dead_pid())
    for file in (made.run.summary, made.run.failure):
        old(file)
    rundir.write_json(made.run.plan, made.plan | {"created": time.time() + 0.001})
    seen = look(made.run)
    assert (seen["run"]["state"], seen["run"]["reason"], seen["progress"]["step"]) == (
        "starting",
        None,
        60,
    )
    assert [r["phase"] for r in seen["ranks"]] == [None, None]


def test_a_run_has_ended_whatever_the_clock_shows(made: Made) -> None:
    """After an NTP step of hours a finished run was listed as died, and shown as never started."""
    rundir.write_json(made.run.plan, made.plan | {"created": time.time() + 9000, "launch": "a1"})
    made.steps(5).supervisor(dead_pid()).summary(launch="a1")
    made.run.event("restart", attempt=2, cause="unknown", step=3)
    old(made.run.summary, 9000)
    assert _both_states(made) == "finished"
    made.run.summary.unlink()
    made.failure()
    rundir.write_json(
        made.run.failure, (rundir.read_json(made.run.failure) or {}) | {"launch": "a1"}
    )
    old(made.run.failure, 9000)
    assert _both_states(made) == "failed"


def test_a_resume_has_not_the_end_of_a_start_in_the_future(made: Made) -> None:
    """The start before it was made before the clock was set back."""
    rundir.write_json(made.run.plan, made.plan | {"launch": "a2"})
    made.supervisor(os.getpid()).steps(5).summary(launch="a1")
    old(made.run.summary, -9000)
    assert _both_states(made) == "running"
    rundir.write_json(made.run.supervisor, {"pid": dead_pid(), "launch": "a1", "started": 1e10})
    assert look(made.run)["run"]["supervisor_pid"] is None


def test_ranks_of_a_clock_that_was_set_back_are_shown(made: Made) -> None:
    made.beats(step=7)
    made.at += 9000
    rundir.write_json(made.run.plan, made.plan | {"created": made.at, "launch": "a1"})
    made.supervisor(os.getpid())
    seen = look(made.run)
    assert [rank["step"] for rank in seen["ranks"]] == [7, 7]
    assert _both_states(made) == "running"


def _both_states(made: Made) -> str:
    """Of monitor and list, which are equal."""
    seen = look(made.run)["run"]["state"]
    assert facts.read(made.run.path).state == seen
    return seen


def test_failure_before_a_restart_is_not_the_end(made: Made) -> None:
    made.supervisor(os.getpid()).steps(10).failure()
    old(made.run.failure, 50)
    made.run.event("restart", attempt=2, cause="unknown", step=10)
    seen = look(made.run)
    assert (seen["run"]["state"], seen["run"]["restarts"]) == ("starting", 1)
    assert seen["warnings"][0]["text"] == "restarted after unknown at step 10"


def test_the_time_left_passes_during_an_evaluation(made: Made) -> None:
    made.first_step -= 20
    made.supervisor(os.getpid()).steps(100).beats("evaluation", step=100)
    seen = look(made.run)
    since = seen["time_unix_s"] - (seen["training"]["last_step_unix_s"] or 0)
    assert since > 20 and seen["progress"]["eta_s"] == pytest.approx(300 * 0.1 - since, abs=0.5)
