"""Lines printed only by ranks other than the first: which are shown, in bounded time and memory."""

from __future__ import annotations

import math
import selectors
from pathlib import Path

import pytest

from tests.unit.verdicts import new_run
from training.core.errors import Exit
from training.core.rundir import read_records
from training.launcher import other_ranks
from training.launcher.other_ranks import KNOWN, MOST, RAISED, WAITING, OtherRanks
from training.launcher.outcome import Outcome
from training.launcher.outputs import Outputs


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


def thrown(text: str, prefix: str = "") -> bytes:
    lines = ("Traceback (most recent call last):", "  File", text)
    return "".join(f"{prefix}{line}\n" for line in lines).encode()


def test_exceptions_that_only_other_ranks_print() -> None:
    others = OtherRanks()
    others.add(0, thrown("OSError: slow disk 1"), first=True)
    for rank in (2, 1):
        others.add(rank, thrown("OSError: slow disk 2"), first=False)
    for number in range(2 * MOST):
        others.add(1, b"line " + b"x" * number + b"\n", first=False)
    others.due(math.inf)
    assert others.silenced
    handled = b"\nDuring handling of the above exception, another exception occurred:\n\n"
    others.add(1, thrown("KeyError: 3") + handled + thrown("ValueError: bad 17"), first=False)
    others.add(1, thrown("ValueError: bad 18", "[rank1]: ")[:-7], first=False)
    others.add(1, b"bad 18\n", first=False)
    others.add(3, thrown("ValueError: bad 19"), first=False)
    others.add(4, b"Exception in thread T (run):\n" + thrown("ValueError: y"), first=False)
    others.add(5, thrown("RuntimeError: z"), first=False)
    assert others.exceptions() == [(1, 3, b"ValueError: bad 18"), (5, 1, b"RuntimeError: z")]
    assert others.due(math.inf) == []


@pytest.mark.parametrize("before", [b"", b"\r 50%|#####     |"])
@pytest.mark.parametrize("silenced", [False, True])
def test_an_exception_that_the_first_rank_has_printed_is_remembered(
    before: bytes, silenced: bool
) -> None:
    """Whatever it prints then, and if the other ranks print no more lines."""
    others = OtherRanks()
    for number in range(2 * MOST * silenced):
        others.add(1, b"line " + b"x" * number + b"\n", first=False)
    others.due(math.inf)
    assert bool(others.silenced) == silenced
    for line in thrown("OSError: retry 1").splitlines(keepends=True):
        others.add(0, before + line, first=True)
        others.add(1, line, first=False)
        before = b""
    for number in range(2 * KNOWN):
        others.add(0, b"shard " + b"x" * number + b"\n", first=True)
    assert others.exceptions() == []
    others.add(1, thrown("OSError: other"), first=False)
    assert others.exceptions() == [(1, 2, b"OSError: other")]
    for kind in range(2 * RAISED):
        others.add(0, thrown(f"{'E' * kind}Error"), first=True)
    assert len(others._raised) == RAISED


@pytest.mark.parametrize(
    ("outcome", "warned"),
    [
        (Outcome(), True),
        (Outcome(failed_at=1.0), False),
        (Outcome(killed=True), False),
        (Outcome(asked=Exit.INTERRUPTED), False),
        (Outcome(resized=True), False),
    ],
)
def test_caught_exceptions_of_another_rank_are_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], outcome: Outcome, warned: bool
) -> None:
    run, others = new_run(tmp_path), OtherRanks()
    outputs = Outputs(run, selectors.DefaultSelector(), lambda: None, [0], 0, others)
    for sample in (3, 17):
        others.add(1, thrown(f"ValueError: bad sample {sample}"), first=False)
    outputs.show_last_of_others(outcome)
    events = [event for event in read_records(run.events) if event["event"] == "warning"]
    assert [(e["code"], e["rank"]) for e in events] == [("warning.exception_caught", 1)] * warned
    shown = capsys.readouterr().err
    assert shown.count("ValueError: bad sample 17") == shown.count(str(run.rank_log(1))) == warned


def test_an_exception_of_a_data_loader_worker_is_counted_once() -> None:
    """In torch's words."""
    others = OtherRanks()
    caught = "ValueError: Caught ValueError in DataLoader worker process 0."
    original = "Original Traceback (most recent call last):\n  File\nValueError: planted\n"
    others.add(1, thrown(caught) + original.encode(), first=False)
    assert others.exceptions() == [(1, 1, caught.encode())]


def test_a_traceback_with_a_prefix_on_each_line_is_shown_as_it_is() -> None:
    others = OtherRanks()
    prefix = b"W1130 12:00:00.000000 7 convert_frame.py:900] [0/0] "
    lines = thrown("OSError: read").splitlines(keepends=True)
    others.add(1, b"".join(prefix + line for line in lines), first=False)
    assert others.exceptions() == []
