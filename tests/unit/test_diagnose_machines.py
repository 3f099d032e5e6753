"""Logs of several machines: the times and ranks in them, and what their launchers report."""

from __future__ import annotations

import calendar
import time
from pathlib import Path

import pytest

from tests.cases import each
from training.diagnose import log_line, result


def found(folder: Path, **logs: str) -> tuple[str, int | None]:
    for name, text in logs.items():
        (folder / f"{name}.log").write_text(text)
    record = result.diagnose([folder])
    return record["cause"], record["rank"]


def raised(rank: int, exception: str = "KeyError: 0") -> str:
    lines = ("Traceback (most recent call last):", '  File "/u/a.py", line 3, in f', exception)
    return "".join(f"[rank{rank}]: {line}\n" for line in lines)


@each(
    ("day", "expected"),
    [
        ("1231", (2025, 12, 31)),
        ("114", (2026, 1, 14)),
        ("0301", (2025, 3, 1)),
        ("229", (2024, 2, 29)),
    ],
)
def test_a_date_without_a_year_is_in_the_past(
    day: str, expected: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = calendar.timegm((2026, 1, 15, 0, 0, 0))
    monkeypatch.setattr(time, "time", lambda: now)
    moment = log_line.time_of(f"[rank0]:[W{day} 23:58:03.5 ProcessGroupNCCL.cpp:1] x")
    assert moment and tuple(time.gmtime(moment)[:3]) == expected


def test_a_date_without_a_year_is_near_the_others_of_its_log(tmp_path: Path) -> None:
    """Rank 5 fails last, after midnight."""
    node0 = (
        "2021-12-31 23:58:04 step 1 loss 2.0\n"
        f"[rank0]:[W101 00:01:00.0 ProcessGroupNCCL.cpp:1] x\n{raised(0)}"
    )
    node1 = f"2022-01-01 00:02:00 step 1 loss 2.0\n{raised(5)}"
    assert found(tmp_path, node0=node1, node1=node0) == ("exception", 0)
