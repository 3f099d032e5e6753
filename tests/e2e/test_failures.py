"""A failing rank: its number, place and cause within seconds, the exit code, no process left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.conftest import processes, wait_until
from tests.e2e.conftest import Launched
from tests.e2e.hooks import in_forward
from training.core.heartbeat import read
from training.core.messages import msg

Launch = Callable[..., Launched]
RUN = ("./launch_train.sh", "2", "configs/dual_gpu/quickstart.py")


def test_exception_in_one_rank_is_named_with_file_and_line(launch: Launch) -> None:
    run = launch(*RUN, hook=in_forward(1, 5, "raise ValueError('planted')"))
    assert run.wait() == 4
    failure = run.failure
    assert (failure["rank"], failure["cause"], failure["exit_code"]) == (1, "exception", 4)
    assert failure["summary"] == "ValueError: planted"
    assert "sitecustomize.py:" in failure["where"]
    assert failure["phase"] == "step 5: forward"
    assert "training failed" in run.output and "rank 1" in run.output
    assert "Traceback" not in run.output.split("training failed")[0], (
        "rank 0's consequential traceback is not shown"
    )


@pytest.mark.soak
@pytest.mark.timed
def test_a_rank_that_is_killed_from_outside_is_named(launch: Launch) -> None:
    run = launch(*RUN, num_iterations=100000)
    run.wait_for("Iter: 3,")
    killed = time.monotonic()
    os.kill(run.pids[0], signal.SIGKILL)
    assert run.wait() == 4
    assert time.monotonic() - killed < 8
    assert run.failure["rank"] == 0 and run.failure["summary"] == "killed by SIGKILL"


@pytest.mark.soak
def test_exit_status_0_in_mid_run_is_a_failure(
    launch: Launch,
) -> None:
    # as a rank that waits in a collective of NCCL
    stays = in_forward(0, 5, "__import__('time').sleep(3600)")
    run = launch(
        *RUN, launcher="torchrun", hang_timeout=3, hook=in_forward(1, 5, "os._exit(0)") + stays
    )
    assert run.wait() == 5
    assert (run.failure["rank"], run.failure["phase"]) == (1, "step 5: forward")
    assert run.failure["kind"] == "hang" and msg("launcher.failure.left") in run.failure["summary"]


@pytest.mark.soak
def test_a_killed_launcher_leaves_no_process(launch: Launch, token: str) -> None:
    run = launch(*RUN, num_iterations=100000, num_workers=1)
    run.wait_for("Iter: 3,")
    assert len(processes(token)) >= 5, "supervisor, two ranks, their workers"
    run.process.kill()
    wait_until(lambda: not processes(token), 8, "everybody gone")


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        *(pytest.param(n, 75, marks=pytest.mark.soak) for n in (signal.SIGTERM, signal.SIGUSR1)),
    ],
)
def test_a_stop_saves_a_checkpoint_and_resumes_exactly(
    launch: Launch, number: signal.Signals, code: int
) -> None:
    run = launch(*RUN, name="stopped", num_iterations=200, save_every=0, num_workers=1)
    run.wait_for("Iter: 3,")
    run.process.send_signal(number)
    assert run.wait() == code
    assert run.summary["status"] == "stopped" and "checkpoint saved" in run.output
    stopped_at = run.summary["steps"]
    assert 3 <= stopped_at < 200
    # Only flags on the command line differ; everything else is restored.
    resumed = launch(
        "./launch_train.sh", "2", tiny=False, resume="stopped", num_iterations=stopped_at + 5
    ).ok()
    assert f"resumed from step_{stopped_at:08d}" in resumed.output
    assert max(resumed.steps) == stopped_at + 5 and sorted(resumed.steps) == list(
        range(1, stopped_at + 6)
    )


STARTS_LATE = """
import os, time
if os.environ.get("RANK") == "0" and "DUET_RUN_DIR" in os.environ:
    time.sleep(3)
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 75, marks=pytest.mark.soak)],
)
def test_a_stop_during_the_start(launch: Launch, number: signal.Signals, code: int) -> None:
    """One rank imports torch, the Python of another one is still starting."""
    run = launch(*RUN, hook=STARTS_LATE)
    wait_until(lambda: (beat := read(run.run.heartbeat(1))) and beat.phase == "importing torch")
    run.process.send_signal(number)
    assert run.wait() == code
    assert (
        "stopped before the training began" in run.output
        and "Traceback" not in run.output
        and "failed" not in run.output
    )


@pytest.mark.soak
def test_a_slow_save_is_not_cut_short(launch: Launch) -> None:
    slow_disk = """
import os, time
if os.environ.get("RANK") == "0":
    real = os.fsync
    os.fsync = lambda file: (time.sleep(2.5), real(file))[1]
"""
    run = launch(*RUN, num_iterations=100000, save_every=0, hook=slow_disk)
    run.wait_for("Iter: 3,", 120)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(60) == 75 and "checkpoint saved" in run.output
    assert len(list(run.run.checkpoints.glob("step_*/manifest.json"))) == 1


@pytest.mark.soak
def test_ranks_that_finish_late_after_a_stop_have_stopped_regularly(launch: Launch) -> None:
    """Ranks that have just finished their work are exiting, not stuck, however long ago the stop
    was requested."""
    # in each of two micro-batches: never silent for 5 s, but longer in total
    pause = "__import__('time').sleep(4)"
    run = launch(
        *RUN,
        num_iterations=100000,
        total_batch_size=512,
        hook=in_forward(0, 7, pause) + in_forward(0, 8, pause),
    )
    wait_until(lambda: (beat := read(run.run.heartbeat(0))) and str(beat) == "step 4: forward")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(60) == 75 and run.summary["steps"] == 4


@pytest.mark.soak
def test_a_slow_first_step_is_saved_before_preemption(
    launch: Launch,
) -> None:
    run = launch(*RUN, num_iterations=100000, hook=in_forward(0, 2, "__import__('time').sleep(9)"))
    wait_until(lambda: (beat := read(run.run.heartbeat(0))) and str(beat) == "step 2: forward")
    run.process.send_signal(signal.SIGUSR1)
    assert run.wait(60) == 75 and run.summary["steps"] == 2 and "checkpoint saved" in run.output


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(launch: Launch) -> None:
    run = launch(*RUN, hook=in_forward(0, 3, "__import__('time').sleep(3600)"))
    run.wait_for("Iter: 2,")
    wait_until(lambda: (beat := read(run.run.heartbeat(0))) and str(beat) == "step 3: forward")
    run.process.send_signal(signal.SIGINT)
    run.wait_for("finishing the current step")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130 and "killing the ranks" in run.output


@pytest.mark.soak
def test_a_stop_of_a_stuck_run_does_not_wait_forever(launch: Launch) -> None:
    run = launch(*RUN, hook=in_forward(0, 3, "__import__('time').sleep(3600)"))
    run.wait_for("Iter: 2,")
    wait_until(lambda: (beat := read(run.run.heartbeat(0))) and str(beat) == "step 3: forward")
    run.process.send_signal(signal.SIGINT)
    assert run.wait(10) == 130
