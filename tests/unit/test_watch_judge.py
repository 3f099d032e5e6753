"""The guilty rank: from synthetic evidence, because each case here takes several ranks in specific
places."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from training.core import phases
from training.core.heartbeat import Heartbeat, HeartbeatRecord, kind
from training.core.phase_timeouts import COMPILE_S, FIRST_STEP_S, OWN, START_S, PhaseTimeouts
from training.core.rundir import RunDir
from training.monitor.health import progress_checks
from training.watchdog import compared_calls, culprit
from training.watchdog.probes import snapshot
from training.watchdog.probes.flight_recorder import Call
from training.watchdog.probes.snapshot import ProcessActivity, RankSnapshot
from training.watchdog.probes.stacks import Frame, Stack, Thread

USER = Frame("/home/me/model.py", 12, "forward")
REDUCE = (
    Frame("/x/site-packages/torch/distributed/distributed_c10d.py", 3140, "all_reduce"),
    Frame("/x/site-packages/torch/distributed/c10d_logger.py", 83, "wrapper"),
    Frame("/home/me/train.py", 50, "train"),
)
BACKWARD = (
    Frame("/x/site-packages/torch/autograd/graph.py", 841, "_engine_run_backward"),
    Frame("/x/site-packages/torch/_tensor.py", 648, "backward"),
    Frame("/home/me/train.py", 60, "train"),
)
WORKER_QUEUE = (
    Frame("/usr/lib/python3.11/selectors.py", 415, "select"),
    Frame("/usr/lib/python3.11/multiprocessing/queues.py", 113, "get"),
    Frame("/x/site-packages/torch/utils/data/dataloader.py", 1275, "_try_get_data"),
    Frame("/x/site-packages/torch/utils/data/dataloader.py", 1438, "_get_data"),
    Frame("/home/me/train.py", 40, "train"),
)


def beat(
    rank: int, phase: str, step: int = 20, place: int = 3, age_s: float = 9.0, first_step: int = 1
) -> HeartbeatRecord:
    import time

    return HeartbeatRecord(
        rank,
        100 + rank,
        77,
        1,
        step,
        place,
        first_step,
        time.monotonic_ns() - int(age_s * 1e9),
        0.0,
        phase,
    )


def seen(
    *frames: Frame,
    state: str = "S",
    busy: float = 0.0,
    gil: bool = False,
    pid: int = 1,
    io: int = 0,
    threads: tuple[Thread, ...] = (),
) -> ProcessActivity:
    stack = (
        Stack(pid, "py-spy", (Thread("MainThread", True, busy > 0, gil, frames), *threads))
        if frames
        else "no permission"
    )
    return ProcessActivity(pid, [state] * 4, busy, io, "pipe_read", [stack, stack])


def rank(
    number: int,
    phase: str,
    process: ProcessActivity,
    *workers: ProcessActivity,
    calls: list[Call] | None = None,
    **more: object,
) -> RankSnapshot:
    return RankSnapshot(beat(number, phase, **more), process, list(workers), calls)  # type: ignore[arg-type]


def test_the_rank_behind_is_guilty_and_the_others_wait() -> None:
    found = culprit.find_culprit(
        [rank(0, "backward", seen(*BACKWARD), place=3), rank(1, "forward", seen(USER), place=2)]
    )
    assert (found.kind, found.rank, found.where) == ("hang", 1, "/home/me/model.py:12")
    assert found.how == "is stuck at /home/me/model.py:12 (forward)"
    assert found.waiting == {
        0: "step 20: backward, waits in backward at /home/me/train.py:60 (train)"
    }


def test_of_ranks_in_the_same_phase_the_one_outside_collectives() -> None:
    inside, outside = (
        rank(1, "backward", seen(*BACKWARD)),
        rank(0, "backward", seen(USER, *BACKWARD)),
    )
    assert culprit.find_culprit([outside, inside]).rank == 0
    spinning = rank(0, "backward", seen(*BACKWARD, busy=1.0, gil=True))
    found = culprit.find_culprit([spinning, inside])
    assert (
        found.rank == 0 and found.how == "spins at /home/me/train.py:60 (train), and holds the GIL"
    )


def test_no_rank_is_blamed_where_all_wait_or_all_are_stuck() -> None:
    found = culprit.find_culprit(
        [rank(0, "backward", seen(*BACKWARD)), rank(1, "backward", seen(*BACKWARD))]
    )
    assert (found.rank, found.where) == (
        None,
        None,
    ) and "all ranks wait for each other, in the same place: the network" in found.how
    assert set(found.waiting) == {0, 1}
    found = culprit.find_culprit([rank(0, "forward", seen(USER)), rank(1, "forward", seen(USER))])
    assert found.rank is None and found.how == "the ranks are stuck, in the same place"


def test_a_waiting_rank_is_not_blamed_for_being_behind() -> None:
    """As with a stalled network: the other rank has received its sums, this one has not."""
    found = culprit.find_culprit(
        [rank(0, "record", seen(*REDUCE), place=6), rank(1, "optimizer", seen(*REDUCE), place=5)]
    )
    assert found.rank is None


def test_of_waiting_ranks_the_one_with_the_fewest_calls() -> None:
    first, second = Call("0", 7, "all_reduce", "float [4]"), Call("0", 8, "all_reduce", "float [4]")
    ahead = rank(0, "record", seen(*REDUCE), place=6, calls=[first, second])
    found = culprit.find_culprit(
        [ahead, rank(1, "optimizer", seen(*REDUCE), place=5, calls=[first])]
    )
    assert found.rank == 1 and found.how == "waits in all_reduce, which the others have left"


def test_the_gpu_for_which_the_others_wait() -> None:
    """All hosts have queued the same calls and wait for their own GPU."""

    def ranks(*states: str) -> list[RankSnapshot]:
        done = Call("0", 7, "all_reduce", "float [4]", open=False)
        return [
            rank(r, "backward", seen(USER), calls=[done, Call("0", 8, "all_reduce", "", state=s)])
            for r, s in enumerate(states)
        ]

    queued, runs, done = "scheduled", "started", "completed"
    found = culprit.find_culprit(ranks(runs, queued, runs))
    assert (found.kind, found.rank, found.where) == ("hang", 1, None)
    assert "collective 8" in found.how and set(found.waiting) == {0, 2}
    for none in ((runs, runs), (queued, queued), (runs, queued, queued), (runs, done, runs)):
        assert culprit.find_culprit(ranks(*none)).rank is None


def test_different_collectives_are_a_desync() -> None:
    common = Call("0", 1, "broadcast", "long [6]")
    three = [Call("0", 2, op, "float [4]") for op in ("all_reduce", "all_reduce", "all_gather")]
    everything = [
        rank(r, "reduce", seen(*REDUCE), calls=[common, call]) for r, call in enumerate(three)
    ]
    found = culprit.find_culprit(everything)
    assert (found.kind, found.rank) == ("desync", 2)
    assert (
        "collective 2: rank 0: all_reduce of float [4]; rank 1: all_reduce of float [4]; rank 2: "
        "all_gather of float [4]" in found.how
    )
    # `how` is a sentence of its own, which does not follow the name of the rank.
    assert found.short().startswith(found.how)
    assert f": {found.how}, for" in found.sentence()
    assert progress_checks._headline(found) == found.how
    found = culprit.find_culprit(everything[1:])
    assert (found.kind, found.rank) == ("desync", None), "two ranks have no majority"
    assert compared_calls.mismatch({0: [common, three[0]], 1: [common, three[1]]}) is None
    assert compared_calls.mismatch({0: [common]}) is None


@pytest.mark.parametrize(
    ("process", "kind_", "how"),
    [
        (seen(USER, state="T"), "stopped", "is stopped (SIGSTOP)"),
        (seen(USER, state="t"), "stopped", "is held by a debugger"),
        (seen(USER, state="D"), "blocked", "is blocked in I/O (pipe_read)"),
        (seen(state="D"), "blocked", "is blocked in I/O (pipe_read)"),
        (
            seen(USER, gil=True),
            "hang",
            "holds the GIL in C, called at /home/me/model.py:12 (forward)",
        ),
        (seen(USER, busy=0.97), "hang", "spins at /home/me/model.py:12 (forward)"),
    ],
)
def test_kind_and_text_of_a_guilty_rank(process: ProcessActivity, kind_: str, how: str) -> None:
    found = culprit.find_culprit(
        [rank(0, "forward", process, place=2), rank(1, "backward", seen(*BACKWARD))]
    )
    assert (found.kind, found.rank, found.how) == (kind_, 0, how)
    assert found.sentence().startswith(f"{kind_.upper()} rank 0")


def test_the_suspects_stack_is_taken_first_and_missing_ones_are_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 is behind; the time is enough for half of the stacks in each look."""
    behind = {0: 20, 1: 20, 2: 19}
    beats = [beat(r, "reduce" if r != 2 else "forward", step) for r, step in behind.items()]
    pids = {rank: 1 << 30 | rank << 8 for rank in behind}
    orders: list[list[int]] = []

    def dump(wanted: Iterable[int], seconds: float) -> dict[int, Stack | str]:
        orders.append(list(wanted))
        stack = Stack(1, "py-spy", (Thread("MainThread", True, False, False, BACKWARD),))
        return dict.fromkeys(orders[-1][: len(orders[-1]) // 2 + 1], stack)

    monkeypatch.setattr(snapshot.stacks, "dump", dump)
    monkeypatch.setattr(snapshot.procfs, "workers", lambda pid: [pid + 1, pid + 2])
    found = snapshot.gather(RunDir(tmp_path), beats, pids)
    ranks, workers = [pids[2], pids[0], pids[1]], [pids[r] + n for r in (2, 0, 1) for n in (1, 2)]
    assert orders[0] == [*ranks, *workers]
    assert orders[1] == [*workers[2:], *ranks, *workers[:2]]
    assert [e.rank for e in found] == [0, 1, 2]
    assert all(one.threads for e in found for one in (e.process, *e.workers))


def test_a_stuck_worker_is_the_place_of_its_rank() -> None:
    stuck, idle = (
        seen(Frame("/home/me/data.py", 7, "__getitem__"), pid=9),
        seen(WORKER_QUEUE[2], pid=8),
    )
    found = culprit.find_culprit(
        [
            rank(0, "fetch", seen(*WORKER_QUEUE), idle, stuck, place=1),
            rank(1, "backward", seen(*BACKWARD)),
        ]
    )
    assert found.where == "/home/me/data.py:7"
    assert (
        found.how
        == "waits for its data-loader worker (pid 9), which is stuck at /home/me/data.py:7 "
        "(__getitem__)"
    )


def test_slow_data_is_not_a_hang() -> None:
    assert culprit.still_reading(rank(0, "fetch", seen(USER), seen(USER, io=1 << 20)))
    assert culprit.still_reading(rank(0, "building the model", seen(USER, io=1 << 20))), (
        "a checkpoint from a slow disk"
    )
    assert culprit.still_reading(rank(0, "epoch 2: creating data iterator", seen(USER, io=1 << 20)))
    assert not culprit.still_reading(rank(0, "fetch", seen(USER, io=100)))
    assert not culprit.still_reading(rank(0, "forward", seen(USER, io=1 << 20)))


def test_an_autograd_hook_in_its_own_thread_is_not_waiting() -> None:
    hook = Thread("pt_autograd_0", False, False, False, (USER,))
    found = culprit.find_culprit(
        [
            rank(0, "backward", seen(*BACKWARD, threads=(hook,))),
            rank(1, "backward", seen(*BACKWARD)),
        ]
    )
    assert (found.rank, found.where) == (0, "/home/me/model.py:12")


def test_ranks_that_wait_for_a_gpu_are_not_blamed(tmp_path: Path) -> None:
    file = tmp_path / "steps.py"
    file.write_text("values = total.tolist()\n")
    result = Frame(str(file), 1, "finish")
    everything = [rank(r, "record", seen(result, busy=1.0)) for r in range(2)]
    assert [e.collective for e in everything] == ["the GPU", "the GPU"]
    assert culprit.find_culprit(everything).rank is None
    assert (
        culprit.find_culprit(
            [
                rank(0, "record", seen(result, busy=1.0), place=6),
                rank(1, "fetch", seen(USER), place=1),
            ]
        ).rank
        == 1
    )


ORDER = [
    beat(0, "importing torch", 0, first_step=0),
    beat(0, "rendezvous with the other ranks", 0, first_step=0),
    beat(0, "waiting for data", 0, first_step=0),
    beat(0, "building the model", 0, first_step=0),
    beat(0, "barrier: epoch 1: synchronise", 0, first_step=0),
    beat(0, "epoch 1: creating data iterator", 0, first_step=0),
    beat(0, "barrier: before iteration", 0, first_step=0),
    beat(0, "progress bar", 0, first_step=0),
    beat(0, "fetch", 1, 1),
    beat(0, "forward", 1, 2),
    beat(0, "fetch", 1, 4),
    beat(0, "record", 1, 9),
    beat(0, "first evaluation", 1, 9),
    beat(0, "evaluation", 1, 10),
    beat(0, "gather state", 1, 11),
    beat(0, "checkpoint", 1, 12),
    beat(0, "barrier: epoch 2: synchronise", 1, 13),
    beat(0, "fetch", 2, 1),
    beat(0, "record", 2, 6),
    beat(0, "barrier: end of training", 2, 7),
]


def test_phases_are_in_the_order_of_the_training() -> None:
    places = [phases.place(b) for b in ORDER]
    assert places == sorted(places) and len(set(places)) == len(places)
    waiting = beat(1, "waiting for data", 0, first_step=0)
    assert phases.place(waiting) == phases.place(beat(0, "preparing data", 0, first_step=0)), (
        "a rank that waits is not behind the one that prepares"
    )


def test_phases_that_wait_for_others() -> None:
    assert phases.waits("barrier: before iteration") and phases.waits("backward")
    assert (
        not phases.waits("fetch")
        and not phases.waits("checkpoint")
        and not phases.waits("progress bar")
    )
    assert (
        phases.needs_data("fetch")
        and phases.needs_data("epoch 3: creating data iterator")
        and not phases.needs_data("record")
    )


def test_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [10**9]
    monkeypatch.setattr("time.monotonic_ns", lambda: clock[0])
    path = tmp_path / "rank0.bin"
    writer = Heartbeat(path, 0)
    for step in range(1, 101):
        writer.step = step
        writer.beat("forward")
        clock[0] += 1_000_000_000
        writer.beat("backward")
        clock[0] += 10_000_000
    budgets = PhaseTimeouts(3.0, compiled=False)
    assert 5 <= budgets.seconds(beat(0, "forward"), path) <= 6.3, "five times the usual duration"
    assert budgets.seconds(beat(0, "backward"), path) == 3, "the floor"
    assert budgets.seconds(beat(0, "never seen"), path) == 3
    assert budgets.seconds(beat(0, "forward", 2, first_step=1), path) == FIRST_STEP_S
    assert (
        PhaseTimeouts(3.0, compiled=True).seconds(beat(0, "backward", 1, first_step=1), path)
        == COMPILE_S
    )
    assert budgets.seconds(beat(0, "evaluation"), path) == OWN["evaluation"]
    assert budgets.seconds(beat(0, "importing torch", first_step=0), path) == START_S
    assert PhaseTimeouts(4000.0, compiled=True).seconds(beat(0, "evaluation"), path) == 4000, (
        "a larger --hang_timeout counts"
    )


def test_compilation_has_its_own_budget_in_every_phase(tmp_path: Path) -> None:
    path = tmp_path / "rank0.bin"
    writer = Heartbeat(path, 0)
    writer.beat("first pass")
    compiled = PhaseTimeouts(3.0, compiled=True)
    assert compiled.seconds(beat(0, "first pass", 0, first_step=0), path) == COMPILE_S
    writer.beat("first evaluation")
    for _ in range(3):  # with data, before the first batch is compiled
        writer.again()
    assert compiled.seconds(beat(0, "first evaluation", 10), path) == COMPILE_S
    assert compiled.seconds(beat(0, "evaluation", 10), path) == OWN["evaluation"]
    assert (
        PhaseTimeouts(3.0, compiled=False).seconds(beat(0, "first pass", 0, first_step=0), path)
        == FIRST_STEP_S
    )


def test_usual_durations_are_updated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, wall = [10**9], [0.0]
    monkeypatch.setattr("time.monotonic_ns", lambda: clock[0])
    monkeypatch.setattr("time.monotonic", lambda: wall[0])
    path = tmp_path / "rank0.bin"
    writer, budgets = Heartbeat(path, 0), PhaseTimeouts(1.0, compiled=False)

    def steps(seconds: float) -> None:
        for _ in range(50):
            writer.beat("forward")
            clock[0] += int(seconds * 1e9)
            writer.beat("record")

    steps(10.0)
    assert budgets.seconds(beat(0, "forward"), path) >= 50
    budgets.roll([path])
    wall[0] += 1000
    steps(0.5)
    assert budgets.seconds(beat(0, "forward"), path) <= 3.2, "the slow beginning is forgotten"


def test_kinds_of_phases() -> None:
    assert kind("barrier: epoch 12: synchronise") == "barrier: epoch #: synchronise"
