"""Another process that takes the memory of a GPU during a run: not a reason for a smaller batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_launch_recovery import plan as trained_plan
from tests.unit.verdicts import new_run, plan, report_error
from training.core.messages import msg
from training.core.rundir import RunDir
from training.diagnose import card, gpu_occupants
from training.launcher import failure_report, recovery_policy, script_recovery
from training.launcher.outcome import Outcome
from training.launcher.recovery_policy import remedy
from training.launcher.restart import Failure, GiveUp, Restart

GIB = 1 << 30
FAILED = Failure("gpu_oom", "error", 1, 1, 23, 20, "step 23: forward", "OutOfMemoryError: text")
OCCUPIED = replace(FAILED, occupied=True)


@pytest.fixture
def run(tmp_path: Path, fake_driver: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Its GPU 1 has 5 of 32 GiB free by now."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_driver))
    monkeypatch.setenv("FAKE_NVML_COUNT", "2")
    monkeypatch.setenv("FAKE_NVML_FREE_GIB", "31,5")
    monkeypatch.setenv("FAKE_NVML_PROCESSES", "4711:1;4712:3,4713:23.5")
    return new_run(tmp_path)


def exhausted(
    run: RunDir,
    then_free: float = 31,
    needs: float | None = 10,
    used: float | None = 1,
    **more: Any,
) -> Any:
    """failure.json of rank 1; GiB: free at the start, estimated and reserved by the rank."""
    memory = {"reserved_bytes": used * GIB, "allocated_bytes": 0} if used is not None else None
    facts = {"memory": {**memory, "largest_free_bytes": 0, "largest": []}} if memory else {}
    report_error(run, 1, "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2", **facts)
    gpus = [
        {
            "index": n,
            "uuid": f"GPU-000000a{n}-0000-4000-8000-000000000000",
            "name": "Card",
            "total_bytes": 32 * GIB,
            "free_bytes": then_free * GIB,
        }
        for n in (0, 1)
    ]
    more |= {"memory": {"total_bytes": needs * GIB}} if needs else {}
    made: Any = plan("cuda", gpus=gpus, **more)
    return failure_report.failure(Outcome(guilty=(1, 1), here=(1, 1)), run, made)


def test_the_processes_that_took_the_memory_are_named(run: RunDir) -> None:
    record = exhausted(run)
    held = record["occupied"]
    assert (held["gpu"], held["held_bytes"], held["total_bytes"]) == (1, 27 * GIB, 32 * GIB)
    assert [p["pid"] for p in held["processes"]] == [4713, 4712], "by memory"
    text = gpu_occupants.text(held)
    assert "27.0" in text and "4713" in text and text in card.of_run(record)
    assert not any("--device_batch_size=" in one for one in record["advice"])


def beside_displays(displays: str, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("FAKE_NVML_PROCESSES", "")
    monkeypatch.setenv("FAKE_NVML_DISPLAYS", displays)
    return exhausted(run)


def test_a_browser_that_took_the_memory_is_named(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = beside_displays(";4714:0.5,4715:25", run, monkeypatch)
    held = record["occupied"]
    assert [p["pid"] for p in held["processes"]] == [4715], "the one with much"
    assert msg("diagnose.gpus.unlisted") not in gpu_occupants.text(held)
    assert any(one.startswith("kill 4715 ") for one in record["advice"])


def test_small_displays_have_not_taken_the_memory(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that the driver attributes to no process is not theirs."""
    record = beside_displays(";4714:0.04,4715:0.005", run, monkeypatch)
    assert record["occupied"]["processes"] == []
    assert msg("diagnose.gpus.unlisted") in gpu_occupants.text(record["occupied"])
    assert not any("kill" in one for one in record["advice"])


def test_displays_that_together_took_the_memory_are_named(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = beside_displays(";4714:0.5,4715:0.8,4716:0.04,4717:0.95", run, monkeypatch)
    assert [p["pid"] for p in record["occupied"]["processes"]] == [4717, 4715, 4714]
    assert not any("kill" in one for one in record["advice"]), "none of them frees much"


def test_the_desktop_is_never_to_be_killed() -> None:
    server: Any = {"pid": 7, "user": "root", "command": "/usr/lib/xorg/Xorg :0", "known": True}
    server["used_bytes"] = 2 * GIB
    browser = {**server, "pid": 9, "user": "ann", "command": "chrome"}
    of: Any = {"gpu": 1, "held_bytes": 1, "total_bytes": 2, "processes": [server]}
    assert "held_pid" not in gpu_occupants.values(of)
    of["processes"] = [server, browser]
    assert gpu_occupants.values(of)["held_pid"] == "9"


def test_the_run_itself_or_what_was_there_before_it_is_not_to_blame_on_others(run: RunDir) -> None:
    for reason, of in (
        ("it uses more than estimated", {"used": 12}),
        ("as at its start, and the estimate fits", {"then_free": 5, "needs": 4}),
        ("it uses more than the others, without an estimate", {"used": 28, "needs": None}),
    ):
        assert "occupied" not in exhausted(run, **of), reason
    for reason, of in (
        ("as at its start, too little for the estimate", {"then_free": 5}),
        ("more than at its start", {"needs": 4}),
        ("of a rank without a report", {"used": None}),
        ("without an estimate", {"needs": None}),
    ):
        assert "occupied" in exhausted(run, **of), reason


def test_processes_of_the_run_are_not_listed(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    beat = type("Beat", (), {"pid": 4712, "rank": 1, "step": 7})
    monkeypatch.setattr(failure_report.heartbeat, "read_all", lambda path: [beat])
    assert [p["pid"] for p in exhausted(run)["occupied"]["processes"]] == [4713]


def test_a_restart_waits_for_the_others_and_keeps_the_batch() -> None:
    pauses, before = [], list[Failure]()
    made = trained_plan(retries=3)
    while isinstance(chosen := remedy(OCCUPIED, made, before), Restart):
        assert not chosen.changes
        pauses.append((chosen.number, chosen.pause_s))
        before.append(OCCUPIED)
    assert pauses == list(enumerate(recovery_policy.OCCUPIED_PAUSES_S, 1))
    smaller = remedy(FAILED, made, [OCCUPIED])
    assert isinstance(smaller, Restart) and smaller.changes == {"device_batch_size": 4}
    again = script_recovery.remedy(OCCUPIED, made, [OCCUPIED])
    assert again == Restart(2, pause_s=recovery_policy.OCCUPIED_PAUSES_S[1])
    assert isinstance(script_recovery.remedy(FAILED, made, [FAILED]), GiveUp)
