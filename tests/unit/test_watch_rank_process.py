"""The process of a heartbeat, also of a rank that another user's torchrun has started."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from tests.unit import targets
from training.core import owner, rundir, standing
from training.core.errors import UserError
from training.core.heartbeat import Heartbeat
from training.host import proc_memory, process
from training.watchdog import discovery

USER, NOBODY = 7, 65534
PYTHON = "import time\nprint('ready', flush=True)\ntime.sleep(1000)\n"
DAEMON = "import os\nos.execvp('sh', ['sh', '-c', 'echo ready; sleep 1000; :'])\n"
CONTAINER = {"host": "6f1c0d9a", "pid_namespace": "pid:[1]"}


def answer(kept: bytes | OSError) -> bytes:
    """What was read, or raises it."""
    if isinstance(kept, OSError):
        raise kept
    return kept


def closed(path: Path) -> Path:
    if path.name == "exe":
        raise PermissionError
    return Path(os.readlink(path))  # noqa: PTH115 – Path.readlink is replaced


@each(
    ("of_file", "changes", "found"),
    [
        (USER, {}, True),
        (NOBODY, {}, True),  # a mount that maps all users to one
        (8, {}, False),
        (USER, {"age_s": 1e7}, False),  # the process has begun since
        (USER, {"boot_s": 1e6}, False),  # a rank of another machine
        (USER, {"program": DAEMON}, False),
        (USER, {"cmdline": b"/home/a/my env/bin/python3\0-u\0train.py\0"}, True),
        (USER, {"cmdline": b"/usr/bin/worker python\0"}, False),
        (USER, {"cmdline": b""}, False),  # of a kernel thread
        (USER, {"cmdline": proc_memory.Blocked()}, True),  # stuck in a driver
        (USER, {"starter": standing.identity(1)}, True),
        (USER, {"starter": CONTAINER}, False),
    ],
)
def test_a_rank_of_another_user(
    of_file: int,
    changes: dict[str, Any],
    found: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = rundir.RunDir(tmp_path / "run")
    run.create()
    rundir.write_json(run.plan, {"starter": changes.get("starter")})
    with targets.running(tmp_path, changes.get("program", PYTHON)) as (pid, _, _):
        with monkeypatch.context() as patched:
            at, ns = time.time() - changes.get("age_s", 0.0), time.monotonic_ns()
            ns -= int((changes.get("age_s", 0.0) + changes.get("boot_s", 0.0)) * 1e9)
            patched.setattr(time, "time", lambda: at)
            patched.setattr(time, "monotonic_ns", lambda: ns)
            Heartbeat(run.heartbeat(0), 0, pid=pid).beat("forward")
        with monkeypatch.context() as patched:
            cmdline = changes.get("cmdline", Path(f"/proc/{pid}/cmdline").read_bytes())
            seen = {"cmdline": cmdline}
            patched.setattr(proc_memory, "read", lambda pid, name: answer(seen.get(name, b"")))
            patched.setattr(process, "_read", lambda pid, name: b"a title")  # its name
            patched.setattr(Path, "readlink", closed)
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
