"""The process of a heartbeat, also of a rank that another user's torchrun has started."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.cases import each
from tests.unit import targets
from training.core import owner, rundir
from training.core.errors import UserError
from training.core.heartbeat import Heartbeat
from training.watchdog import discovery
from training.watchdog.probes import procfs

USER, NOBODY = 7, 65534


@each(
    ("of_file", "beat_age_s", "found"),
    [
        (USER, 0.0, True),
        (NOBODY, 0.0, True),  # a mount that maps all users to one
        (8, 0.0, False),
        (USER, 1e7, False),  # the process has begun since
    ],
)
def test_a_rank_of_another_user(
    of_file: int, beat_age_s: float, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = rundir.RunDir(tmp_path / "run")
    run.create()
    rundir.write_json(run.plan, {})
    with targets.running(
        tmp_path, "import time\nprint('ready', flush=True)\ntime.sleep(1000)\n"
    ) as (pid, _, _):
        with monkeypatch.context() as patched:
            at = time.time() - beat_age_s
            patched.setattr(time, "time", lambda: at)
            Heartbeat(run.heartbeat(0), 0, pid=pid).beat("forward")
        with monkeypatch.context() as patched:
            patched.setattr(procfs, "_memory", lambda pid, name: b"")
            with pytest.raises(UserError) as none:
                discovery.of_run(run.path)
            assert none.value.problems[0].code == "run.no_ranks", "its own is seen by its mappings"
            patched.setattr(os, "access", lambda path, mode: not str(path).endswith("environ"))
            patched.setattr(owner, "unknown", lambda: NOBODY)
            patched.setattr(owner, "uid", lambda path: of_file if path.suffix == ".bin" else USER)
            if found:
                assert discovery.of_run(run.path) == {0: pid}
            else:
                with pytest.raises(UserError) as none:
                    discovery.of_run(run.path)
                assert none.value.problems[0].code == "run.no_ranks"
