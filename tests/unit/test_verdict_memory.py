"""Failure cards of a GPU that was out of memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.unit.verdicts import failed, new_run, report_error
from training.core import find_run
from training.core.rundir import RunDir, write_json
from training.diagnose import card, result
from training.watchdog import rank_exit

if TYPE_CHECKING:
    from training.core.contracts.verdict import FailureRecord


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(find_run, "WORK", tmp_path)  # the run is in its experiments/
    return new_run(tmp_path)


def test_advice_for_out_of_memory_has_the_values_of_the_plan(run: RunDir) -> None:
    report_error(run, 1, "OutOfMemoryError", "CUDA out of memory.")
    advice = failed(run)["advice"]
    assert all(value in advice[0] for value in ("device_batch_size is 8", "try 4", "512 tokens"))
    assert advice[1] == "./launch_train.sh 2 --resume=run --device_batch_size=4"


def test_exhausted_memory_is_in_the_units_of_the_plan(run: RunDir) -> None:
    """A card of 24 GiB does not seem to have 26 GB allocated."""
    report_error(run, 1, "OutOfMemoryError", "CUDA out of memory.")
    largest = [{"bytes": 1 << 34, "count": 1}, {"bytes": 20 << 20, "count": 3}]
    memory: dict[str, Any] = {"allocated_bytes": 24 << 30, "reserved_bytes": 24 << 30}
    memory |= {"largest_free_bytes": 512 << 10, "largest": largest}
    text = card.of_run(cast("FailureRecord", failed(run) | {"memory": memory}))
    row = next(line for line in text.splitlines() if "1 × " in line)
    sizes = re.findall(r"[\d.]+ [KMG]i?B", row)
    assert sizes == ["24.0 GiB", "24.0 GiB", "512 KiB", "16.0 GiB", "20 MiB"]


def test_the_card_of_a_catalogued_exception_is_that_of_the_diagnosis(run: RunDir) -> None:
    """The title of its cause, the exception below, and the memory with its snapshot."""
    said = "CUDA out of memory. Tried to allocate 20.00 MiB. " + "allocated memory " * 12
    memory: dict[str, Any] = {"allocated_bytes": 24 << 30, "reserved_bytes": 24 << 30}
    memory |= {"largest_free_bytes": 512 << 10, "largest": [], "file": "/runs/rank1.memory.pickle"}
    report_error(run, 1, "OutOfMemoryError", said, memory=memory)
    record = failed(run)
    write_json(run.failure, record)
    (run.path / "plan.json").write_text("{}")
    shown, diagnosed = card.of_run(record), card.draw(result.diagnose([run.path]))
    assert shown.split("\n")[:3] == diagnosed.split("\n")[:3]
    cause, detail = shown.split("\n")[:2]
    assert cause == "  Cause      gpu_oom: a GPU is out of memory"
    assert detail.strip().startswith("OutOfMemoryError: CUDA") and detail.endswith(" memory…")
    rows = [
        [x for x in t.split("\n") if "24.0 GiB" in x or "pickle" in x] for t in (shown, diagnosed)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 2 and rows[0][0].startswith("  Memory ")
    # found in the log of a console, too
    console = run.path.parent / "console.log"
    console.write_text(f"[ERROR] 2026-11-29 06:41:42 training failed\n{shown}\n")
    found = result.diagnose([console])
    assert (found["cause"], found["rank"]) == ("gpu_oom", 1)
    assert found["summary"] == detail.strip()


def test_a_long_exception_in_the_line_before_the_card_ends_with_a_whole_word(run: RunDir) -> None:
    report_error(run, 1, "OutOfMemoryError", "CUDA out of memory. " + "allocated " * 30)
    how = rank_exit.explain(run, 1, 1, [], {}).how
    assert how.endswith(" allocated…") and len(how) < 220
