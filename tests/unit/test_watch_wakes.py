"""Progress of collectives, where a thread that waits may be woken without any."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.unit import targets
from tests.unit.test_watch_samples import LIBRARY, MINE, PROCESS, judged, look, reduce
from training.watchdog.hang_report import ADVANCES, WORKS, HangFinding, NoFinding
from training.watchdog.probes import procfs, sampling
from training.watchdog.probes.sampling import Sample
from training.watchdog.probes.stacks import Frame
from training.watchdog.script_watchdog import ScriptWatch


@pytest.mark.parametrize(
    ("before", "after", "advances"),
    [
        ({"newest_call": 5}, {"newest_call": 5}, False),
        ({"newest_call": 5}, {"newest_call": 6}, True),
        ({"newest_call": 5}, {"newest_call": 5, "sockets": {7: 900}}, False),
        ({}, {}, False),
        ({}, {"sockets": {7: 900}}, True),
        ({}, {"sockets": {8: 900}}, False),
        ({"own_sockets": frozenset()}, {"own_sockets": frozenset()}, True),
        ({"gpu": True}, {"gpu": True}, True),
        ({"gpu": True, "newest_call": 5}, {"gpu": True, "newest_call": 5}, False),
    ],
)
def test_a_wake_by_a_signal_is_not_progress(
    before: dict[str, Any], after: dict[str, Any], advances: bool
) -> None:
    """A thread of the rank starts a process every few seconds: each of its ends may wake the main
    thread. Connection 8 is that to torch's store."""
    waits = dataclasses.replace(
        reduce(),
        sockets={7: 500, 8: 500},
        own_sockets=frozenset({7, 8}),
        group_sockets=frozenset({7}),
    )
    lock = look(MINE)
    found = judged(
        (
            dataclasses.replace(waits, **before),
            dataclasses.replace(waits, turns=3, **{**before, **after}),
        ),
        (lock, lock),
    )
    if advances:
        assert isinstance(found, NoFinding) and found.code == ADVANCES
        assert "rank 0 is at" in found.text and "rank 1 is at" in found.text
    else:
        assert isinstance(found, HangFinding) and (found.rank, set(found.waiting)) == (1, {0})


def test_a_collective_waits_for_no_child() -> None:
    """A thread of the rank runs nvidia-smi, which some samples show, and whose bytes count as the
    rank's when it has ended."""
    child = dataclasses.replace(PROCESS, pid=9, parent=1)
    monitored = dataclasses.replace(reduce(io_bytes=500_000), children={9: child})
    lock = look(MINE)
    found = judged((reduce(), monitored), (lock, lock))
    assert isinstance(found, HangFinding) and (found.rank, set(found.waiting)) == (1, {0})


def test_a_collective_that_moves_data_has_not_ended() -> None:
    before = dataclasses.replace(reduce(), sockets={7: 0}, own_sockets=frozenset({7}))
    after = dataclasses.replace(before, sockets={7: 50_000})
    found = judged((before, after), (look(MINE), look(MINE)))
    assert isinstance(found, NoFinding) and found.code == WORKS


@pytest.mark.parametrize("code", [WORKS, ADVANCES])
def test_a_silence_that_is_taken_for_work_is_one_warning(code: str) -> None:
    logged: list[str] = []
    watch = ScriptWatch(1.0, warn=logged.append)
    watch._verdict = (watch._samples, NoFinding(code, "rank 0 is at train.py:7 (count)"))
    assert watch._result(9.0, 1.0, False) is None and logged == []
    for silent in (10.5, 20.0, 99.0):
        assert watch._result(silent, 1.0, False) is None
    assert len(logged) == 1 and "rank 0 is at train.py:7 (count)" in logged[0]


def test_the_flight_recorder_is_asked_when_a_rank_was_woken_in_a_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def newest(rank: int) -> int:
        asked.append(rank)
        return len(asked)

    turns = [3]
    monkeypatch.setattr(procfs, "turns", lambda pid, thread: turns[0])
    with targets.ranks(tmp_path, "locks", "waits") as (pids, _):
        first = sampling.take(pids, newest)
        second = sampling.take(pids, newest, first)
        assert asked == [1] and second.looks[1].newest_call == 1
        turns[0] += 1
        assert sampling.take(pids, newest, second).looks[1].newest_call == 2
        assert asked == [1, 1] and second.looks[0].newest_call is None


SPINS = {"state": "R", "cpu_s": 11.0, "main_cpu_s": 11.0}


@pytest.mark.parametrize(
    ("calls", "found"), [((5, 5), True), ((None, None), True), ((5, 6), False), ((5, None), True)]
)
@pytest.mark.parametrize("queue", [False, True])
def test_a_gpu_that_waits_in_further_collectives_advances(
    tmp_path: Path, calls: tuple[int | None, int | None], queue: bool, found: bool
) -> None:
    """CUDA's wait spins: nothing wakes it. In an evaluation with FSDP a collective is always
    pending."""
    script = tmp_path / "train.py"
    script.write_text("total += loss\n" if queue else "total += loss.item()\n")
    at = Frame(str(script), 1, "evaluate")
    before, after = (
        dataclasses.replace(look(at, gpu=True, **facts), newest_call=call)
        for facts, call in zip(({"state": "R"}, SPINS), calls, strict=True)
    )
    lock = look(MINE, gpu=True)
    other = (lock, lock) if queue else (before, after)
    result = judged((before, after), other)
    if found:
        assert isinstance(result, HangFinding) and result.rank == (1 if queue else None)
    else:
        assert isinstance(result, NoFinding) and result.code == ADVANCES


@pytest.mark.parametrize("state", ["R", "S"])
def test_further_barriers_on_gpus_are_progress_of_a_rank_that_nothing_wakes(state: str) -> None:
    """As of an evaluation with a barrier in each batch."""
    barrier = Frame(f"{LIBRARY}/distributed/distributed_c10d.py", 5000, "barrier")
    at = look(barrier, MINE, gpu=True, state=state)
    before = dataclasses.replace(at, newest_call=5)
    assert sampling._newest(0, at, Sample(1.0, {0: before}), lambda rank: 6) == 6
    assert isinstance(judged((before, before), (before, before)), HangFinding)
    after = dataclasses.replace(at, newest_call=6)
    result = judged((before, after), (before, after))
    assert isinstance(result, NoFinding) and result.code == ADVANCES


def test_the_flight_recorder_is_asked_about_a_wait_for_a_gpu(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("total += loss.item()\n")
    at = Frame(str(script), 1, "evaluate")
    for seen, asked in (
        (look(at, gpu=True), True),
        (look(MINE, gpu=True, state="R"), True),  # in a launch, perhaps
        (look(MINE, gpu=True, state="R", holds_gil=True), False),
        (look(MINE, gpu=True), False),
        (look(at), False),
    ):
        before = Sample(1.0, {0: dataclasses.replace(seen, newest_call=5)})
        call = sampling._newest(0, seen, before, lambda rank: 6)
        assert call == (6 if asked else 5)


def test_answers_of_torchs_store_do_not_count_as_progress_of_its_rank() -> None:
    """NCCL's heartbeat monitor of each rank asks the store every second; a thread of rank 0
    answers by read() and write()."""
    here = dataclasses.replace(look(MINE), served=frozenset({7}), sockets={7: 1000})
    asked = dataclasses.replace(
        look(MINE, io_bytes=1099 + 20), served=frozenset({7}), sockets={7: 1099}
    )
    found = judged((here, asked), (reduce(), reduce()))
    assert isinstance(found, HangFinding) and (found.rank, found.may_end) == (0, False)
    reads = dataclasses.replace(asked, process=dataclasses.replace(PROCESS, io_bytes=9000))
    assert isinstance(judged((here, reads), (reduce(), reduce())), NoFinding), "its own bytes too"
