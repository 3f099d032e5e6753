"""Which of several idle ranks is stuck, on synthetic samples."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.unit.test_watch_samples import LIBRARY, MINE, PROCESS, judged, look, reduce
from training.diagnose.advice import of_end, of_kind
from training.watchdog.hang_report import (
    HANG,
    LOCKED,
    MAY_END,
    UNEVEN,
    WORKS,
    HangFinding,
    NoFinding,
)
from training.watchdog.probes import procfs
from training.watchdog.probes.stacks import Frame

if TYPE_CHECKING:
    from training.core.contracts.verdict import EndRecord

LOCKS, READS = Frame("/home/me/train.py", 9, "locks"), Frame("/home/me/train.py", 7, "reads")
C10D = f"{LIBRARY}/distributed/distributed_c10d.py"


def test_of_several_stuck_ranks_none_is_blamed() -> None:
    """The one with the lowest number may wait for another in a way that is unknown."""
    reads, locks = look(READS, pid=11), look(LOCKS, pid=12)
    found = judged((reduce(), reduce()), (reads, reads), (locks, locks))
    assert isinstance(found, HangFinding) and (found.kind, found.rank) == ("hang", None)
    assert found.how == (
        "several ranks are stuck, and one of them may wait for another: rank 1 is stuck at "
        "/home/me/train.py:7 (reads), rank 2 is stuck at /home/me/train.py:9 (locks)"
    )
    assert set(found.waiting) == {0}


def test_the_rank_that_holds_the_lock_of_a_file_is_to_blame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads, locks = look(READS, pid=11), look(LOCKS, pid=12)
    monkeypatch.setattr(procfs, "lock_holders", lambda: {11: 12, 5: 6})
    found = judged((reduce(), reduce()), (reads, reads), (locks, locks))
    assert isinstance(found, HangFinding) and (found.rank, found.where) == (
        2,
        "/home/me/train.py:9",
    )
    assert found.waiting[1].startswith("is at /home/me/train.py:7 (reads)")
    monkeypatch.setattr(procfs, "lock_holders", lambda: {11: 12, 12: 11})
    found = judged((reduce(), reduce()), (reads, reads), (locks, locks))
    assert isinstance(found, HangFinding) and found.rank is None, "each waits for the other"


def test_a_rank_that_reads_the_store_waits_for_another(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text('result = store.get("result")\n')
    reads, locks = look(Frame(str(script), 1, "main")), look(LOCKS)
    found = judged((reduce(), reduce()), (reads, reads), (locks, locks))
    assert isinstance(found, HangFinding) and found.rank == 2
    assert found.waiting[1] == f"waits in store.get at {script}:1 (main)"


def test_a_barrier_of_the_store_is_polled() -> None:
    """new_group with TORCH_DIST_INIT_BARRIER, which one rank has not called."""
    group = look(Frame(C10D, 1063, "_store_based_barrier"), Frame(C10D, 5863, "new_group"), LOCKS)
    found = judged((group, dataclasses.replace(group, turns=2)), (reduce(), reduce()))
    assert isinstance(found, HangFinding) and (found.kind, found.rank) == ("uneven", None)
    assert found.waiting[0] == "waits in new_group at /home/me/train.py:9 (locks)"


DESTROYS = look(Frame(C10D, 2411, "destroy_process_group"), Frame("/home/me/train.py", 30, "main"))


@pytest.mark.parametrize(
    ("left", "rank"), [((1,), 1), ((0, 2), None), ((0, 1, 2), None)], ids=["one", "two", "all"]
)
def test_ranks_that_have_left_the_training(left: tuple[int, ...], rank: int | None) -> None:
    """With NCCL destroy_process_group in a `finally` waits, before the exception is printed."""
    pairs = [(DESTROYS, DESTROYS) if one in left else (reduce(), reduce()) for one in range(3)]
    found = judged(*pairs)
    assert isinstance(found, HangFinding) and found.rank == rank
    assert found.kind == (HANG if len(left) == 3 else UNEVEN)
    assert found.where == ("/home/me/train.py:30" if rank else None)
    assert ("destroy_process_group" in found.how) == (len(left) < 3)
    end = {"kind": found.kind, "cause": "hang", "rank": rank, "evidence": found.evidence()}
    waiting = {str(one): place for one, place in found.waiting.items()}
    sentences = of_end(cast("EndRecord", end | {"waiting": waiting, "where": None}), None, {}, {})
    assert (sentences == of_kind("left", {})) == (len(left) < 3)


SLEEPS = dataclasses.replace(look(Frame("/home/me/train.py", 3, "main")), ends_by="timeout")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (dict[str, object](), MAY_END),
        ({"ends_by": "", "turns": 2}, MAY_END),
        ({"ends_by": "", "sockets": {8: 900}}, WORKS),
        ({"ends_by": "", "children": {9: dataclasses.replace(PROCESS, pid=9, io_bytes=40)}}, WORKS),
    ],
)
def test_a_rank_whose_wait_may_end_is_not_a_hang_for_a_long_time(
    change: dict[str, Any], code: str
) -> None:
    """It waits to repeat a request, or for answers of a slow service or simulator."""
    before = dataclasses.replace(
        SLEEPS,
        sockets={7: 500, 8: 500},
        outside=frozenset({8}),
        children={9: dataclasses.replace(PROCESS, pid=9, io_bytes=0)},
    )
    after = dataclasses.replace(before, **change)
    found = judged((reduce(), reduce()), (before, after))
    assert isinstance(found, NoFinding) and found.code == code
    found = judged((reduce(), reduce()), (before, after), alone=True)
    assert isinstance(found, HangFinding) and found.may_end
    assert (found.rank, found.where) == (1, "/home/me/train.py:3")


@pytest.mark.parametrize("alone", [False, True])
def test_a_lock_that_another_program_holds_is_never_a_hang(alone: bool) -> None:
    lock = dataclasses.replace(look(LOCKS), locked_out="the lock of /data/x, which b (pid 7) holds")
    found = judged((reduce(), reduce()), (lock, lock), alone=alone)
    assert isinstance(found, NoFinding) and found.code == LOCKED
    assert str(found).startswith("rank 1 waits for the lock of /data/x, which b (pid 7) holds")


@pytest.mark.parametrize("alone", [False, True])
def test_a_lock_for_which_all_ranks_wait_is_named(alone: bool) -> None:
    """As in a download that each of them begins."""
    lock = dataclasses.replace(look(LOCKS), locked_out="the lock of /data/x, which b (pid 7) holds")
    for ranks in ([(lock, lock)], [(SLEEPS, SLEEPS), (lock, lock)]):
        found = judged(*ranks, alone=alone)
        assert isinstance(found, NoFinding) and found.code == LOCKED
        assert str(found) == (
            f"rank {len(ranks) - 1} waits for the lock of /data/x, which b (pid 7) holds; "
            "no rank is working"
        )
    found = judged((look(MINE), look(MINE, cpu_s=10.9)), (lock, lock), alone=alone)
    assert isinstance(found, NoFinding) and found.code == WORKS


def test_bytes_between_ranks_do_not_make_a_wait_end() -> None:
    """The heartbeat of torch's store, for one."""
    lock = dataclasses.replace(look(LOCKS), sockets={7: 500}, outside=frozenset())
    found = judged((reduce(), reduce()), (lock, dataclasses.replace(lock, sockets={7: 900})))
    assert isinstance(found, HangFinding) and (found.rank, found.may_end) == (1, False)


def test_a_call_in_c_that_holds_the_gil_does_not_end() -> None:
    """It blocks the threads that it may wait for."""
    holds = dataclasses.replace(look(LOCKS, holds_gil=True), ends_by="timeout")
    found = judged((reduce(), reduce()), (holds, holds))
    assert isinstance(found, HangFinding) and (found.rank, found.may_end) == (1, False)


def test_a_rank_that_works_decides_beside_one_that_sleeps() -> None:
    works = look(MINE), look(MINE, cpu_s=10.9)
    for ranks in ((works, (SLEEPS, SLEEPS)), ((SLEEPS, SLEEPS), works)):
        found = judged((reduce(), reduce()), *ranks)
        assert isinstance(found, NoFinding) and found.code == WORKS
