"""Errors of GPUs that the driver reports through NVML."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.unit.verdicts import plan
from training.host import kernel_log
from training.host.xid_events import XidEvent, XidEvents
from training.launcher import kernel_evidence
from training.launcher.outcome import Outcome


@pytest.fixture
def driver(fake_driver: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Its GPUs."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_driver))
    monkeypatch.setenv("FAKE_NVML_XID", "1:79,0:31,1:45")
    return [f"GPU-000000a{n}-0000-4000-8000-000000000000" for n in (0, 1)]


def reported(events: XidEvents, count: int) -> list[XidEvent]:
    wait_until(lambda: len(events.read()) == count, 60)
    return events.read()


def test_the_errors_of_the_runs_gpus(driver: list[str]) -> None:
    before, events = time.time(), XidEvents(driver)
    found = reported(events, 3)
    assert [(event.uuid, event.number) for event in found] == [
        (driver[1], 79),
        (driver[0], 31),
        (driver[1], 45),
    ]
    assert all(before <= event.time <= time.time() for event in found)
    follower = events._follower
    events.close()
    assert follower and follower.returncode == -signal.SIGKILL
    events.close()
    assert events.read() == found, "also afterwards"


def test_the_errors_of_other_gpus_are_not_followed(driver: list[str]) -> None:
    events = XidEvents(driver[:1])
    assert [event.number for event in reported(events, 1)] == [31]
    events.close()


def test_the_error_of_a_gpu_that_is_lost_meanwhile(
    driver: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML may answer GPU_IS_LOST to the wait itself."""
    monkeypatch.setenv("FAKE_NVML_XID", "0:31,lost,1:79")
    events = XidEvents(driver)
    assert [event.number for event in reported(events, 2)] == [31, 79]
    events.close()


@pytest.mark.parametrize(
    ("name", "value"), [("EVENTS", "0"), ("INIT", "9"), ("LOST", "3")], ids=str.lower
)
def test_a_driver_without_events(
    driver: list[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"FAKE_NVML_{name}", value)
    events = XidEvents(driver)
    assert events._follower
    events._follower.wait(60)
    assert events.read() == []
    events.close()


def test_a_driver_that_does_not_answer_delays_nothing(
    driver: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NVML_SLEEP", "600")
    began = time.monotonic()
    events = XidEvents(driver)
    assert events.read() == []
    events.close()
    assert time.monotonic() - began < 60


STARTS = """
import os, sys
from training.host.xid_events import XidEvents
events = XidEvents(sys.argv[1:])
while not events.read(): pass
print(events._follower.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_it_ends_with_the_launcher(driver: list[str]) -> None:
    launcher = subprocess.run(
        [sys.executable, "-c", STARTS, *driver], stdout=subprocess.PIPE, check=False
    )
    assert launcher.returncode == -signal.SIGKILL
    wait_until(lambda: not Path(f"/proc/{int(launcher.stdout)}").exists(), 8)


def test_it_is_started_where_the_kernels_log_may_not_be_read(
    driver: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [{"index": n, "uuid": uuid} for n, uuid in enumerate(driver)]
    part = [{"index": 0, "uuid": "MIG-00000000"}]
    monkeypatch.setattr(kernel_log, "KMSG", tmp_path / "kmsg")
    started = []
    for readable, used in ((False, found), (True, found), (False, []), (False, part)):
        kernel_log.KMSG.touch() if readable else kernel_log.KMSG.unlink(missing_ok=True)
        outcome = Outcome()
        kernel_evidence.begin(outcome, plan("cuda", gpus=used))  # type: ignore[arg-type]
        started.append(outcome.xids is not None)
        kernel_evidence.end(outcome)
    assert started == [True, False, False, False]
