"""Lines printed only by ranks other than the first: which are shown, in bounded time and memory."""

from __future__ import annotations

import math

import pytest

from training.launcher import other_ranks
from training.launcher.other_ranks import MOST, WAITING, OtherRanks


def test_lines_that_only_other_ranks_print() -> None:
    others = OtherRanks()
    others.add(0, b"NCCL version 2.27 pid 17\n", first=True)
    others.add(1, b"NCCL version 2.27 pid 18\nWarning: on", first=False)
    others.add(1, b"e GPU\n 50%\r100%\n", first=False)
    others.add(2, b"Warning: one GPU\n", first=False)
    others.add(
        2, b"Traceback (most recent call last):\n  File\nValueError: x\nafter\n", first=False
    )
    others.add(1, b"[rank1]: Traceback (most recent call last):\n", first=False)
    others.add(1, b"[rank1]:   File\n[rank1]: ValueError: x\n", first=False)
    others.add(2, b"Exception in thread Thread-1 (work):\nTraceback (most", first=False)
    others.add(2, b" recent call last):\n  File\nValueError: y\n", first=False)
    assert others.due(0.0) == [], "the first rank may print them later"
    assert others.due(1e12) == [(1, b"Warning: one GPU"), (2, b"after")]
    for number in range(2 * MOST):
        others.add(1, b"line " + b"x" * number + b"\n", first=False)
    assert len(others.due(1e12)) == MOST - 2 and others.silenced == MOST + 2


def test_a_flood_of_other_ranks_takes_bounded_time_and_memory() -> None:
    others = OtherRanks()
    others.add(0, b"step 1\n" * 100_000, first=True)
    for _ in range(20):
        others.add(1, b"tep 1\n" + b"step 1\n" * 100_000, first=False)
    others.add(1, b"ste", first=False)
    assert len(others._waiting) == WAITING
    assert others.due(1e12) == [] and not others.silenced
    others.add(1, b"p 2\nWarning: one GPU\n", first=False)
    assert others.due(1e12) == [(1, b"Warning: one GPU")]


def test_lines_of_other_ranks_before_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    others = OtherRanks()
    for now, rank, line in (
        (1.0, 1, "warned"),
        (1.0, 2, "early"),
        (3.0, 1, "own"),
        (3.0, 2, "lost"),
    ):
        monkeypatch.setattr(other_ranks.time, "monotonic", lambda now=now: now)
        others.add(rank, f"{line}\n".encode(), first=False)
    others.drop_after(2.0, failed=1)
    assert others.due(1e12) == [(1, b"warned"), (2, b"early"), (1, b"own")]


def test_errors_of_collectives_stay_in_the_logs() -> None:
    others = OtherRanks()
    others.add(1, b"[rank1]:[E1128 19:42:14.05 ProcessGroupNCCL.cpp:682] timeout\n", first=False)
    others.add(1, b"frame #0: c10::Error::Error()\nDiskWarning: slow\n", first=False)
    assert others.due(math.inf) == [(1, b"DiskWarning: slow")]
