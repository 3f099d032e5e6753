"""Stall detection on synthetic samples: uninterruptible I/O, and slow saves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.unit.test_watch_samples import LIBRARY, MINE, PROCESS, judged, look, reduce
from training.watchdog.hang_report import BLOCKED, HANG, WORKS, HangFinding, NoFinding
from training.watchdog.probes import procfs, stacks
from training.watchdog.probes.sampling import ProcessSample
from training.watchdog.probes.stacks import Frame, Stack, Thread


def test_blocked_in_io() -> None:
    blocked = look(MINE, state="D", waits_in="nfs_wait_on_request")
    found = judged((reduce(), reduce()), (blocked, blocked))
    assert isinstance(found, HangFinding) and (found.kind, found.rank, found.where) == (
        "blocked",
        1,
        "/home/me/train.py:7",
    )
    assert found.how == "is blocked in I/O (nfs_wait_on_request) at /home/me/train.py:7 (step)"
    moving = look(MINE, state="D", faults=5000)
    assert isinstance(judged((reduce(), reduce()), (blocked, moving)), NoFinding), (
        "it reads a mapped file slowly"
    )
    assert isinstance(
        judged((reduce(), reduce()), (blocked, blocked), written=5_000_000), NoFinding
    ), "the kernel writes back its data"
    assert isinstance(judged((reduce(), reduce()), (blocked, blocked), written=4096), HangFinding)


def test_a_child_that_writes_to_disk_is_work() -> None:
    """As torch's checkpoint process, whose data the kernel writes."""
    child = dataclasses.replace(PROCESS, pid=2, state="D", waits_in="folio_wait_writeback")
    waits = dataclasses.replace(look(MINE), children={2: child})
    saved = judged((reduce(), reduce()), (waits, waits), alone=True, written=5_000_000)
    assert isinstance(saved, NoFinding) and saved.code == WORKS
    assert isinstance(judged((reduce(), reduce()), (waits, waits), alone=True), HangFinding)


@pytest.mark.parametrize(
    ("wakes", "faults", "line", "alone", "found"),
    [
        (0, 0, 7, False, True),
        (5000, 0, 9, False, False),  # it looks up many files
        (5000, 0, 9, True, False),
        (200, 150, 7, True, False),  # or has page faults on a slow mount
        (900, 0, 7, False, False),
        (900, 0, 7, True, True),  # NVIDIA's driver polls a GPU that does not answer
        (3, 0, 7, False, False),  # slow, or woken by a timer of the kernel
        (3, 0, 7, True, True),
        (3, 0, 9, True, False),
    ],
)
def test_io_that_advances_is_not_a_hang(
    wakes: int, faults: int, line: int, alone: bool, found: bool
) -> None:
    before = look(dataclasses.replace(MINE, line=line), state="D", waits_in="rpc_wait_bit_killable")
    last = look(MINE, state="D", faults=PROCESS.faults + faults)
    after = dataclasses.replace(last, turns=wakes)
    result = judged((reduce(), reduce()), (before, after), alone=alone)
    if found:
        assert isinstance(result, HangFinding) and (result.kind, result.rank) == (BLOCKED, 1)
    else:
        assert isinstance(result, NoFinding) and result.code == WORKS


@pytest.mark.parametrize(
    ("wakes", "alone", "found"),
    [(0, False, True), (5000, True, False), (3, False, False), (3, True, True)],
)
def test_a_worker_whose_io_advances_is_not_a_hang(
    monkeypatch: pytest.MonkeyPatch, wakes: int, alone: bool, found: bool
) -> None:
    worker = dataclasses.replace(PROCESS, pid=9, parent=1, state="D")
    monkeypatch.setattr(procfs, "workers", lambda pid: [9])
    monkeypatch.setattr(stacks, "dump", lambda pids: dict.fromkeys(pids, "no stack"))
    gets = look(Frame(f"{LIBRARY}/utils/data/dataloader.py", 1275, "_try_get_data"), MINE)
    before = dataclasses.replace(gets, children={9: worker}, children_turns={9: 0})
    after = dataclasses.replace(before, children_turns={9: wakes})
    for pairs in (((reduce(), reduce()), (before, after)), ((before, after), (before, after))):
        result = judged(*pairs, alone=alone)
        if found and (alone or pairs[0] != pairs[1]):
            assert isinstance(result, HangFinding) and result.kind == HANG
        else:
            assert isinstance(result, NoFinding)


@pytest.mark.parametrize("state", ["D", "S"])
@pytest.mark.parametrize(
    "code",
    [
        "os.fsync(file.fileno())",
        "file.close()",
        "with open(path, 'wb') as file:",
        "torch.save(state, path)",
    ],
)
def test_a_slow_save_is_not_a_hang_for_a_long_time(tmp_path: Path, code: str, state: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{code}\n")
    frames = [Frame(str(script), 1, "save")]
    if code.startswith("torch"):
        frames.insert(0, Frame(f"{LIBRARY}/serialization.py", 900, "_save"))
    saves = look(*frames, state=state, waits_in="nfs_wait_on_request")
    logged = judged((reduce(), reduce()), (saves, saves))
    assert (
        isinstance(logged, NoFinding)
        and logged.code == WORKS
        and logged.text.startswith("one of them works: rank 1 is at ")
    )
    found = judged((reduce(), reduce()), (saves, saves), alone=True)
    assert isinstance(found, HangFinding) and (found.kind, found.rank) == (
        "blocked" if state == "D" else "hang",
        1,
    )


def in_background(state: str, *saver: Frame) -> ProcessSample:
    """The main thread waits for another one."""
    library = Frame("/u/lib/python3.11/threading.py", 327, "Condition.wait")
    main = look(library, Frame("/home/me/train.py", 29, "main"), state=state)
    assert isinstance(main.stack, Stack)
    executor = Frame(f"{LIBRARY}/distributed/checkpoint/state_dict_saver.py", 270, "save")
    waits = Thread("executor", False, False, False, (library, executor))
    threads = (*main.stack.threads, waits, Thread("saver", False, False, False, (*saver, executor)))
    return dataclasses.replace(main, stack=dataclasses.replace(main.stack, threads=threads))


@pytest.mark.parametrize("state", ["D", "S"])
def test_a_slow_save_in_the_background_is_not_a_hang_for_a_long_time(state: str) -> None:
    saves = in_background(state, Frame("/home/me/slow.py", 13, "write_data"))
    logged = judged((reduce(), reduce()), (saves, saves))
    assert isinstance(logged, NoFinding) and logged.code == WORKS
    assert isinstance(
        judged((reduce(), reduce()), (saves, saves), alone=True, written=5_000_000),
        NoFinding if state == "D" else HangFinding,
    ), "the kernel writes back its data"
    found = judged((reduce(), reduce()), (saves, saves), alone=True)
    assert isinstance(found, HangFinding) and (found.kind, found.rank, found.where) == (
        "blocked" if state == "D" else "hang",
        1,
        "/home/me/slow.py:13",
    )
    assert found.evidence()[0] == "/home/me/slow.py:13 (write_data)"


def test_a_stuck_save_for_which_all_ranks_wait_is_found() -> None:
    """The savers of the others wait for it in a collective."""
    reduces = Frame(f"{LIBRARY}/distributed/distributed_c10d.py", 3000, "gather_object")
    waits, stuck = in_background("S", reduces), in_background("S", MINE)
    logged = judged((waits, waits), (stuck, stuck))
    assert isinstance(logged, NoFinding) and logged.code == WORKS
    found = judged((waits, waits), (stuck, stuck), alone=True)
    assert isinstance(found, HangFinding) and (found.kind, found.rank, found.where) == (
        "hang",
        1,
        "/home/me/train.py:7",
    )
