"""A rank that compiles again, at any step, is slow and not stuck."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from training.core.heartbeat import Heartbeat, HeartbeatRecord, read_all
from training.core.phase_timeouts import COMPILE_S
from training.core.rundir import RunDir
from training.watchdog import heartbeat_watchdog
from training.watchdog.heartbeat_watchdog import HeartbeatWatchdog
from training.watchdog.probes import snapshot, waits
from training.watchdog.probes.snapshot import ProcessActivity, RankSnapshot
from training.watchdog.probes.stacks import Frame, Stack, Thread

TORCH = "/x/site-packages/torch"
USER = Frame("/home/me/model.py", 12, "forward")
EVAL_FRAME = Frame(f"{TORCH}/_dynamo/eval_frame.py", 1050, "compile_wrapper")
# of a compilation, innermost first: in the forward pass, and in that of the backward pass
FORWARD = (
    Frame(f"{TORCH}/_inductor/scheduler.py", 3000, "Scheduler.fuse_nodes"),
    Frame(f"{TORCH}/_dynamo/convert_frame.py", 1800, "_compile.compile_inner"),
    EVAL_FRAME,
    USER,
)
BACKWARD = (
    Frame(f"{TORCH}/_inductor/graph.py", 2000, "GraphLowering.codegen"),
    Frame(f"{TORCH}/_inductor/compile_fx.py", 900, "_compile_fx_inner"),
    Frame(f"{TORCH}/_functorch/_aot_autograd/runtime_wrappers.py", 2300, "backward"),
)
KERNEL = (Frame("/x/site-packages/triton/compiler/compiler.py", 300, "compile"), USER)
# of what has been compiled
RUNS = (
    Frame(f"{TORCH}/_inductor/runtime/triton_heuristics.py", 1500, "CachingAutotuner.run"),
    Frame("/tmp/torchinductor_me/ab/cab.py", 90, "call"),
    Frame(f"{TORCH}/_inductor/compile_fx.py", 1919, "run"),
    Frame(f"{TORCH}/_inductor/output_code.py", 600, "CompiledFxGraph.__call__"),
    Frame(f"{TORCH}/_functorch/_aot_autograd/runtime_wrappers.py", 500, "runtime_wrapper"),
    EVAL_FRAME,
    USER,
)
WAITS = (Frame(f"{TORCH}/autograd/graph.py", 841, "_engine_run_backward"), USER)
PLAN: dict[str, Any] = {"config": {"hang_timeout": 3}, "compile": {"value": False}, "ranks": 1}


def stack(*frames: Frame, autograd: tuple[Frame, ...] = ()) -> Stack:
    thread = Thread("pt_autograd_0", False, True, True, autograd)
    return Stack(1, "py-spy", (Thread("MainThread", True, True, not autograd, frames), thread))


@pytest.mark.parametrize(
    ("frames", "so"), [(FORWARD, True), (BACKWARD, True), (KERNEL, True), (RUNS, False)]
)
def test_frames_that_compile(frames: tuple[Frame, ...], so: bool) -> None:
    assert waits.compiles(frames) is so


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path)
    made.create()
    writer = Heartbeat(made.heartbeat(0), 0, 1)
    for writer.step in (1, 151):
        writer.beat("forward")
    return made


def examined(run: RunDir, monkeypatch: pytest.MonkeyPatch, taken: Stack | str) -> bool:
    """Would the run be ended?"""

    def gather(run: RunDir, beats: list[HeartbeatRecord], pids: object) -> list[RankSnapshot]:
        process = ProcessActivity(1, ["R"] * 4, 1.0, stacks=[taken])
        return [RankSnapshot(beat, process, [], None) for beat in beats]

    monkeypatch.setattr(heartbeat_watchdog.snapshot, "gather", gather)
    watch, beats = HeartbeatWatchdog(run, PLAN, range(1)), read_all(run.heartbeats)
    return watch._examine(beats, {0: 1}, beats, None) is not None


@pytest.mark.parametrize("taken", [stack(*FORWARD), stack(*WAITS, autograd=BACKWARD)])
def test_a_later_compilation_is_not_a_hang_for_half_an_hour(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    taken: Stack,
) -> None:
    assert not examined(run, monkeypatch, taken)
    assert "it compiles: slow, not stuck" in capsys.readouterr().err
    later = time.monotonic_ns() + int(COMPILE_S * 1e9)
    monkeypatch.setattr("time.monotonic_ns", lambda: later)
    assert examined(run, monkeypatch, taken)


def test_compiled_code_that_is_stuck_is_a_hang(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert examined(run, monkeypatch, stack(*RUNS))


def test_a_compilation_is_seen_where_ptrace_is_forbidden(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot.on_request, "ask", lambda folder, pids: {0: stack(*FORWARD)})
    assert not examined(run, monkeypatch, "forbidden")
