"""Stall detection on synthetic samples: GPUs, other machines, clocks."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from tests.unit.test_watch_scripts import Clock
from training.watchdog import gpu_waits, script_watchdog, stall_detector
from training.watchdog.hang_report import (
    ADVANCES,
    BLIND,
    ELSEWHERE,
    GPU_WORKS,
    LOOPS,
    UNEVEN,
    WORKS,
    HangFinding,
    NoFinding,
)
from training.watchdog.probes import procfs, sampling, stacks
from training.watchdog.probes.sampling import ProcessSample, Sample
from training.watchdog.probes.stacks import Frame, Stack, Thread
from training.watchdog.probes.trace import RankTrace, courses
from training.watchdog.script_watchdog import ScriptWatch

# What cannot be created here: a GPU, other machines.
MINE, LIBRARY = Frame("/home/me/train.py", 7, "step"), "/u/lib/python3.11/site-packages/torch"
PROCESS = procfs.Process(1, 0, "S", "python train.py", 10.0, 10.0, 1000, "futex_wait")


def look(
    *frames: Frame, gpu: bool = False, holds_gil: bool = False, **facts: object
) -> ProcessSample:
    process = dataclasses.replace(PROCESS, **facts)  # type: ignore[arg-type]
    return ProcessSample(
        process, Stack(1, "py-spy", (Thread("MainThread", True, False, holds_gil, frames),)), gpu
    )


def judged(
    *pairs: tuple[ProcessSample, ProcessSample],
    elsewhere: bool = False,
    joining: bool = False,
    alone: bool = False,
    written: int = 0,
) -> HangFinding | NoFinding:
    samples = [
        Sample(float(at), {rank: pair[at] for rank, pair in enumerate(pairs)}, at * written)
        for at in (0, 1)
    ]
    return stall_detector.detect_stall(
        samples, {}, elsewhere=elsewhere, joining=joining, alone=alone
    )


def reduce(**facts: object) -> ProcessSample:
    return look(
        Frame(f"{LIBRARY}/distributed/distributed_c10d.py", 3000, "all_reduce"), MINE, **facts
    )  # type: ignore[arg-type]


def test_a_rank_without_a_cpu_core_is_not_idle() -> None:
    """On an overloaded machine it uses almost no CPU time, and each look finds it at the same
    line."""
    before = dataclasses.replace(look(MINE, state="R"), queued={1: 5.0, 7: 1.0})
    after = dataclasses.replace(look(MINE, state="R", cpu_s=10.01), queued={1: 5.9, 7: 1.0})
    logged = judged((reduce(), reduce()), (before, after))
    assert (
        isinstance(logged, NoFinding)
        and logged.code == WORKS
        and logged.text.startswith("one of them works: rank 1 is at ")
    )
    assert isinstance(
        judged(
            (reduce(), reduce()), (before, dataclasses.replace(after, queued={1: 5.1, 9: 50.0}))
        ),
        HangFinding,
    )


def test_a_computing_backward_is_not_waiting() -> None:
    here = Frame(f"{LIBRARY}/autograd/graph.py", 800, "_engine_run_backward")
    waits, computes = look(here, MINE), look(here, MINE, cpu_s=10.9)
    assert isinstance(judged((waits, waits), (waits, computes)), NoFinding)
    found = judged((waits, waits), (waits, waits))
    assert isinstance(found, HangFinding) and found.rank is None


def test_ranks_that_progress_but_are_always_seen_in_the_same_place() -> None:
    # One waits for its data in every step, the other for it: each look may find both in the same
    # place, with almost no CPU time.
    sleeps = look(MINE)
    awake = dataclasses.replace(reduce(), turns=3)
    found = judged((sleeps, sleeps), (reduce(), awake))
    assert isinstance(found, NoFinding) and found.code == ADVANCES
    assert "rank 1 is at /home/me/train.py:7 (step)" in found.text
    assert isinstance(judged((sleeps, sleeps), (awake, awake)), HangFinding)


def test_a_rank_that_waits_for_its_gpu_is_not_guilty(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("total += loss.item()\n")
    at, lock = Frame(str(script), 1, "step"), look(MINE)
    spinning = (
        look(at, gpu=True, state="R"),
        look(at, gpu=True, state="R", cpu_s=11.0, main_cpu_s=11.0),
    )
    found = judged(spinning, (lock, lock))
    assert isinstance(found, HangFinding) and (found.rank, found.waiting) == (
        1,
        {0: f"waits in the GPU at {script}:1 (step)"},
    )
    without = tuple(dataclasses.replace(one, gpu=False) for one in spinning)
    assert isinstance(judged((without[0], without[1]), (lock, lock)), NoFinding), (
        "on a CPU it computes"
    )


@pytest.mark.parametrize(
    ("pending", "alone", "certain"),
    [
        (True, False, True),
        (False, False, False),
        (False, True, False),
        (None, False, False),
        (None, True, True),
    ],
)
def test_a_gpu_that_computes_is_not_waiting(
    pending: bool | None, alone: bool, certain: bool
) -> None:
    watch = ScriptWatch(1.0, pending=lambda rank: pending if rank == 1 else None)
    places = {
        0: "waits in barrier at train.py:9 (step)",
        1: "waits in the GPU at train.py:7 (step)",
    }
    found = HangFinding("uneven", None, None, "all ranks wait for each other", places, {}, 1.0)
    result = watch._doubted(found, alone, [])
    assert (result is found) == certain
    if pending is False:
        assert isinstance(result, NoFinding) and result.code == GPU_WORKS
    stopped = dataclasses.replace(found, kind="stopped", rank=0)
    assert watch._doubted(stopped, False, []) is stopped, "regardless of the others"


@pytest.mark.parametrize(
    ("begun", "works"),
    [
        ({0: False, 1: False}, True),
        ({0: False, 1: True}, False),
        ({0: False, 1: None}, False),
        ({0: None, 1: None}, False),
    ],
)
@pytest.mark.parametrize("waits", [(0, 1), (0,)], ids=["both", "one"])
def test_gpus_whose_collectives_are_queued_behind_their_work_compute(
    begun: dict[int, bool | None], works: bool, waits: tuple[int, ...]
) -> None:
    """Where rank 1 waits in a barrier on the CPU, it need not have a collective on its GPU."""
    watch = ScriptWatch(1.0, pending=lambda rank: True, begun=begun.__getitem__)
    places = {r: f"waits in {'the GPU' if r in waits else 'barrier'} at a.py:7" for r in (0, 1)}
    found = HangFinding("hang", None, None, "all ranks wait for each other", places, {}, 1.0)
    result = watch._doubted(found, True, [])
    expected = works or (waits == (0,) and begun == {0: False, 1: None})
    assert (isinstance(result, NoFinding) and result.code == GPU_WORKS) == expected
    stuck = dataclasses.replace(found, rank=2)
    assert watch._doubted(stuck, True, []) is stuck


@pytest.mark.parametrize(("begun", "works"), [((False, None), True), ((None, None), False)])
def test_barriers_queued_behind_the_work_of_gpus_are_not_a_hang(
    begun: tuple[bool | None, ...], works: bool
) -> None:
    watch = ScriptWatch(1.0, pending=lambda rank: True, begun=begun.__getitem__)
    places = dict.fromkeys((0, 1), "waits in barrier at train.py:9 (step)")
    found = HangFinding("hang", None, None, "all ranks wait for each other", places, {}, 1.0)
    result = watch._doubted(found, True, [0, 1])
    assert (isinstance(result, NoFinding) and result.code == GPU_WORKS) == works


@pytest.mark.parametrize(
    ("pending", "alone", "gpus", "rank", "works"),
    [
        (False, False, [0, 1], None, True),
        (True, False, [0, 1], None, False),
        (None, False, [0, 1], None, True),
        (None, True, [0, 1], None, False),
        (None, False, [0, 1], 2, False),
        (False, False, [], None, False),
    ],
)
def test_a_backward_on_a_gpu_without_a_pending_collective_computes(
    pending: bool | None, alone: bool, gpus: list[int], rank: int | None, works: bool
) -> None:
    """On a CPU it would use time. Another stuck rank is named even if no recorder answers."""
    watch = ScriptWatch(1.0, pending=lambda rank: pending)
    places = dict.fromkeys((0, 1), "waits in backward at train.py:9 (step)")
    found = HangFinding("hang", rank, None, "all ranks wait for each other", places, {}, 1.0)
    result = watch._doubted(found, alone, gpus)
    assert (isinstance(result, NoFinding) and result.code == GPU_WORKS) == works


def test_the_samples_show_which_ranks_use_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Frame(f"{LIBRARY}/autograd/graph.py", 800, "_engine_run_backward")
    for gpu, kind in ((True, NoFinding), (False, HangFinding)):
        looks = {rank: look(here, MINE, gpu=gpu) for rank in (0, 1)}
        moments = iter([Sample(at, looks) for at in (0.0, 0.5, 1.0)])
        monkeypatch.setattr(script_watchdog, "take", lambda *_, moments=moments: next(moments))
        watch, samples = ScriptWatch(1.0, pending=lambda rank: False), list[Sample]()
        for _ in range(3):
            found = watch._judged(samples, {0: 1, 1: 1}, {}, 2.0, 1.0, False)
        assert isinstance(found, kind) and getattr(found, "code", GPU_WORKS) == GPU_WORKS


def test_a_failed_look_is_reported_and_the_next_one_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[str] = []
    watch = ScriptWatch(1.0, warn=logged.append)

    def refused(*_: object) -> Sample:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(script_watchdog, "take", refused)
    watch._examine(watch._samples, {0: 1}, {}, 2.0, 1.0, False)
    for _ in range(3):
        assert watch._result(2.0, 1.0, False) is None
    assert len(logged) == 1 and "PermissionError: [Errno 1] Operation not permitted" in logged[0]
    waiting = Sample(1.0, {0: reduce()})
    monkeypatch.setattr(script_watchdog, "take", lambda *_: waiting)
    watch._examine(watch._samples, {0: 1}, {}, 2.0, 1.0, False)
    assert watch._verdict and watch._verdict[1] == script_watchdog.NOTHING_YET


def test_a_possible_endless_loop_is_reported_before_the_run_is_ended() -> None:
    logged: list[str] = []
    watch = ScriptWatch(1.0, warn=logged.append)
    watch._verdict = (
        watch._samples,
        NoFinding(LOOPS, "rank 0 is at train.py:7 (count)"),
    )
    watch._loops, watch._training = script_watchdog.SPIN_LOOKS - 1, True
    assert watch._result(2.0, 1.0, False) is None and logged == [], (
        "a few looks may agree by chance"
    )
    watch._loops = script_watchdog.SPIN_LOOKS
    for _ in range(3):
        assert watch._result(2.0, 1.0, False) is None
    assert logged == [
        "no output for 2 s: rank 0 is at train.py:7 (count);"
        " the run is ended after 5 s without output: print progress, or raise --hang_timeout"
    ]


def test_a_burst_of_stacks_ends_on_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(script_watchdog, "time", clock)
    watch, asked = ScriptWatch(1.0), []

    def dump(pids: list[int], seconds: float) -> dict[int, str]:
        asked.append(seconds)
        clock.now += 3.0
        if len(asked) == closes_at:
            watch.close()
        return {pids[0]: "a stack"}

    monkeypatch.setattr(stacks, "dump", dump)
    closes_at = 0
    assert len(watch._burst(7)) == 4 and asked == [10.0, 7.0, 4.0, 1.0], "one limit for all of them"
    asked.clear()
    closes_at = 2
    assert len(watch._burst(7)) == 2, "closed"


def test_ranks_may_be_waiting_for_other_machines() -> None:
    result = judged((reduce(), reduce()), (reduce(), reduce()), elsewhere=True)
    assert isinstance(result, NoFinding) and result.code == ELSEWHERE
    assert result.text.endswith(": rank 0 waits in all_reduce, rank 1 waits in all_reduce")
    assert isinstance(judged((reduce(), reduce()), (reduce(), reduce())), HangFinding)
    begins = look(
        Frame(f"{LIBRARY}/distributed/distributed_c10d.py", 1700, "init_process_group"), MINE
    )
    result = judged((begins, begins), (begins, begins), joining=True)
    assert isinstance(result, NoFinding) and result.code == ELSEWHERE
    assert isinstance(
        judged((reduce(), reduce()), (reduce(), reduce()), joining=True), HangFinding
    ), "all ranks are there when that has ended"
    lock = look(MINE)
    found = judged((reduce(), reduce()), (lock, lock), elsewhere=True)
    assert isinstance(found, HangFinding) and found.rank == 1, (
        "a stuck rank of this machine is found here"
    )


@pytest.mark.parametrize(
    ("ended", "how"),
    [
        ({1: 0}, "has finished (status 0), the others wait for it"),
        ({1: None}, "has ended (status unknown), the others wait for it"),
        ({1: -2}, "killed by SIGINT, the others wait for it"),
        ({1: 1}, "exited with status 1, the others wait for it"),
        (
            {1: None, 3: 0},
            "has ended (status unknown); the others wait for the ranks that have ended: 1, 3",
        ),
        ({0: 0, 1: -6}, "killed by SIGABRT; the others wait for the ranks that have ended: 0, 1"),
    ],
)
def test_a_rank_that_has_ended_joins_no_collective(ended: dict[int, int | None], how: str) -> None:
    samples = [Sample(float(at), {2: reduce()}) for at in (0, 1)]
    found = stall_detector.detect_stall(samples, ended)
    assert isinstance(found, HangFinding)
    assert (found.kind, found.rank, found.how) == (UNEVEN, 1, how)


def test_without_stacks_there_is_no_verdict() -> None:
    blind = ProcessSample(PROCESS, "process 1 cannot be inspected", False)
    result = judged((reduce(), reduce()), (blind, blind))
    assert result == NoFinding(BLIND, "no stack of rank 1: process 1 cannot be inspected")
    logged: list[str] = []
    watch = ScriptWatch(1.0, warn=logged.append)
    watch._verdict = (watch._samples, result)
    for _ in range(3):
        assert watch._result(2.0, 1.0, False) is None
    assert logged == [f"hang detection is not possible: {result}"]


def test_a_rank_that_exits_slowly_is_not_one_without_a_stack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exits = dataclasses.replace(PROCESS, command="[python]", waits_in="exit_mm")
    monkeypatch.setattr(procfs, "read_process", lambda pid, thread=0: exits)
    monkeypatch.setattr(stacks, "dump", lambda pids: dict.fromkeys(pids, "process 1 has ended"))
    assert sampling.take({0: 1}).looks == {}


def test_rates_of_a_trace() -> None:
    first, last = look(MINE), look(MINE, cpu_s=10.5, io_bytes=5000, faults=10)
    child = dataclasses.replace(PROCESS, pid=2, cpu_s=1.0)
    first = dataclasses.replace(first, children={2: child}, sockets={7: 100, 8: 5})
    last = dataclasses.replace(
        last,
        children={2: dataclasses.replace(child, cpu_s=1.4, faults=6)},
        sockets={7: 1100, 9: 50},
    )
    course = RankTrace(0, (first, last), 2.0)
    assert (course.own_cpu, course.childrens_cpu) == (pytest.approx(0.25), pytest.approx(0.2))
    assert course.bytes_moved == (4000 + 1000 + 50) / 2 and course.faults == 8, (
        "of the child too: it reads a mapped file"
    )
    assert course.children_work and not course.idle and course.same_place
    assert courses([]) == {}


@pytest.mark.parametrize(("file", "debugged"), [("bdb.py", True), ("threading.py", False)])
def test_a_thread_at_a_prompt_counts_only_if_the_main_thread_is_in_a_debugger(
    monkeypatch: pytest.MonkeyPatch, file: str, debugged: bool
) -> None:
    found = HangFinding("hang", 0, "main.py:1", "is stuck", {}, {}, 9.0)
    watch = ScriptWatch(60.0, warn=[].append)
    monkeypatch.setattr(script_watchdog.system_calls, "prompts", lambda pid: True)
    monkeypatch.setattr(watch, "_result", lambda *_: found)
    watch._quiet_since -= 100.0
    watch._sampled_at = time.monotonic()  # none is due
    watch._samples = [Sample(0.0, {0: look(Frame(f"/usr/lib/{file}", 3, "wait"), MINE)})]
    assert watch.look({0: os.getpid()}) is (None if debugged else found)


def test_a_rank_that_waits_in_the_queue_of_its_gpu_is_not_guilty() -> None:
    """It does not wait for a result, as a script that prints every 100 steps: the GPU's queue is
    full, and a launch polls for a place anywhere in the model. It may also compute."""
    at = Frame(f"{LIBRARY}/nn/modules/linear.py", 125, "forward")
    before = look(at, MINE, gpu=True, state="R")
    after = look(at, MINE, gpu=True, state="R", cpu_s=11.0, main_cpu_s=11.0)
    lock = look(MINE, gpu=True)
    found = judged((before, after), (lock, lock))
    assert isinstance(found, HangFinding) and found.rank == 1
    assert gpu_waits.on_gpu(found, gpu_waits.QUEUE) == [0]
    assert gpu_waits.on_gpu(found) == []
    for pending, certain in ((True, True), (False, False), (None, False)):
        watch = ScriptWatch(1.0, pending=lambda rank, pending=pending: pending)  # type: ignore[misc]
        result = watch._doubted(found, True, [])
        assert isinstance(result, HangFinding) == certain
    both = judged((before, after), (before, after))
    result = ScriptWatch(1.0, pending=lambda rank: True)._doubted(both, True, [])
    assert isinstance(result, NoFinding) and result.code == WORKS, "no rank is stuck"
    python = look(at, MINE, gpu=True, state="R", holds_gil=True)
    used = look(at, MINE, gpu=True, state="R", holds_gil=True, cpu_s=11.0, main_cpu_s=11.0)
    assert isinstance(judged((python, used), (lock, lock)), NoFinding), "a loop in Python"
