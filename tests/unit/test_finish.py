"""The end of a complete training: the sample comes after the summary."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.test_launch_attempt import PLAN
from training.core import phases, rundir
from training.core.errors import Exit
from training.core.heartbeat import Heartbeat, read_all
from training.core.rundir import RunDir, read_json
from training.launcher import timeouts
from training.trainer import finish
from training.watchdog.start import RanksWatch


def write(run: RunDir) -> Any:
    session: Any = SimpleNamespace(
        run=run,
        task=SimpleNamespace(unit="tokens"),
        position=SimpleNamespace(step=0),
        parameters=12,
        raw=torch.nn.Linear(3, 4),
        loss_scale=None,
    )
    recorder: Any = SimpleNamespace(flush=lambda: None)
    position: Any = SimpleNamespace(step=9, tokens=90)
    plan: Any = PLAN | {"launch": "ab", "created": 0.0}
    return finish.write_summary(session, plan, recorder, position, Exit.DONE, 0.0)


def test_an_end_during_the_sample_leaves_the_summary(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(session: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(finish, "sample", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(run)
    found = read_json(run.summary) or {}
    assert (found["status"], found["steps"], found["sample"]) == ("done", 9, None)
    monkeypatch.setattr(finish, "sample", lambda session: "once upon")
    assert write(run)["sample"] == "once upon" == (read_json(run.summary) or {})["sample"]


def test_a_disk_that_is_full_after_the_sample(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def sampled(session: object) -> str:
        monkeypatch.setattr(rundir, "write_json", full)
        return "once upon"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(finish, "sample", sampled)
    assert write(run)["status"] == "done"
    assert (read_json(run.summary) or {})["sample"] is None
    assert "No space left on device" in capfd.readouterr().err


@pytest.mark.parametrize("phase", ["summary", "sample"])
def test_a_stop_request_does_not_end_it(
    run: RunDir, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Heartbeat(run.heartbeat(0), 0).beat(phase)
    monkeypatch.setattr(timeouts, "STALL_S", 0.0)
    watch = RanksWatch(run, PLAN, range(1), 1)
    assert not timeouts.silent(read_all(run.heartbeats), Exit.INTERRUPTED, watch)
    monkeypatch.setattr(timeouts, "SAVING_S", 0.0)
    assert timeouts.silent(read_all(run.heartbeats), Exit.INTERRUPTED, watch)
    assert phase in phases.AT_END
