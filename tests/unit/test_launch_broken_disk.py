"""A disk that answers every access with an error, as one that was pulled out, or a file server that
was reinstalled: the run ends with its failure card and its notification."""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from tests.unit.test_launch_recovery import plan
from training.core.contracts.plan import Plan
from training.core.errors import Exit
from training.core.rundir import RunDir
from training.launcher import endings, failure_report, notification, supervisor
from training.launcher.outcome import Outcome
from training.launcher.post_run import PostRun

SIGBUS = 1, -signal.SIGBUS  # of rank 1, by its heartbeat
OWN = cast(Plan, plan() | {"created": 0.0})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()

    def failing(access: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *rest: Any, **more: Any) -> Any:
            if str(path).startswith(str(made.path)):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return access(path, *rest, **more)

        return call

    for module, name in ((os, "stat"), (os, "lstat"), (os, "scandir"), (os, "open"), (io, "open")):
        monkeypatch.setattr(module, name, failing(getattr(module, name)))
    monkeypatch.setattr(builtins, "open", io.open)
    return made


def test_the_card_and_the_notification_need_no_disk(run: RunDir) -> None:
    record = failure_report.failure(Outcome(guilty=SIGBUS, here=SIGBUS), run, OWN)
    assert (record["cause"], record["rank"]) == ("segfault", 1)
    endings.keep_failure(run, record, OWN)
    facts = notification.payload(run, OWN, Exit.TRAINING, begun=True, known=record)
    assert (facts["status"], facts["cause"], facts["run_dir"]) == ("failed", "segfault", None)
    run.remove_tokens()


def test_any_other_access_ends_the_run_with_its_error(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "_attempts", lambda *_: run.path.stat())
    monkeypatch.setattr(supervisor, "_prepare", lambda *_: None)
    code, why = supervisor._run(run, OWN, set(), PostRun(run, OWN), ())
    assert code == Exit.TRAINING and str(run.path) in why
    assert f"[Errno {errno.EIO}]" in capfd.readouterr().err
