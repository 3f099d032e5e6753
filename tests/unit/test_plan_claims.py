"""Whose run is it: two launches that want the same one, launch scripts that are killed or asked to
stop while the plan is written."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.conftest import ENHANCED, python
from tests.unit.test_plan import lacking, make
from training.core import standing
from training.core.errors import Exit, UserError
from training.core.rundir import RunDir, read_json, write_json
from training.launcher import rendezvous
from training.plan import writer


@pytest.fixture
def folders(home: Path, tmp_path: Path) -> list[str]:
    return [f"--out_dir={tmp_path}/runs", f"--log_dir={tmp_path}/logs"]


@pytest.fixture
def shells() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that could become supervisors."""
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    found = [subprocess.Popen(waits, stdin=subprocess.PIPE) for _ in range(2)]
    yield found
    for one in found:
        one.communicate()


def planned(starter: subprocess.Popen[bytes], *args: str) -> RunDir:
    asked, plan, checks = make("--device=cpu", "--depth=1", *args, script=ENHANCED)
    return writer.write(plan, checks, asked, rendezvous.ask, starter.pid)


def test_of_two_that_resume_a_run_at_once_one_is_refused(
    folders: list[str], tmp_path: Path, shells: list[subprocess.Popen[bytes]]
) -> None:
    """Both plans have found it free. The process that takes it is its supervisor later."""
    shell, other = shells
    with subprocess.Popen(["true"]) as gone:
        run = planned(gone, *folders, "--run_name=mine")
    asked = ["--device=cpu", *folders, "--resume=mine"]
    first, second = (make(*asked, script=ENHANCED) for _ in range(2))
    writer.write(first[1], first[2], first[0], rendezvous.ask, shell.pid)
    before, logs = run.plan.read_bytes(), [*first[0].logs.iterdir()]
    with pytest.raises(UserError) as refused:
        writer.write(second[1], second[2], second[0], rendezvous.ask, other.pid)
    assert refused.value.code == Exit.RESOURCES and [*first[0].logs.iterdir()] == logs
    assert run.plan.read_bytes() == before
    (problem,) = lacking(*asked, script=ENHANCED)
    assert problem.fixes[1] == f"kill {shell.pid}"
    shutil.copytree(run.path, tmp_path / "runs/copy")
    make("--device=cpu", *folders, "--resume=copy", script=ENHANCED)
    write_json(run.summary, {"status": "done", "launch": first[1]["launch"]})
    make(*asked, script=ENHANCED)  # it has ended, though a notebook's process lives on
    run.summary.unlink()
    assert standing.starter(run) == shell.pid
    shell.kill()
    shell.wait()
    make(*asked, script=ENHANCED)


def test_a_resume_whose_launch_script_was_killed_leaves_the_run_as_it_was(
    folders: list[str],
) -> None:
    with subprocess.Popen(["true"]) as gone:
        run = planned(gone, *folders, "--run_name=mine")
    write_json(run.data, {"total_steps": 9})
    plan = read_json(run.plan)
    assert plan
    write_json(run.summary, {"status": "stopped", "launch": plan["launch"], "time": time.time()})
    for _ in range(2):
        with subprocess.Popen(["true"]) as gone:
            planned(gone, *folders, "--resume=mine")
        assert standing.plan_file(run) == run.plan_before, "at once, not after a minute"
        assert standing.ends(run)[0]
        assert read_json(run.plan_before) == plan
        assert read_json(run.data_before) == {"total_steps": 9}


LATE = """
import os, signal, sys, time
from training.cli import plan
from training.plan import writer
write = writer._write_files
def late(*args):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(os.getpid(), number)
        time.sleep(0.01)
    write(*args)
writer._write_files = late
sys.exit(plan.main())
"""


def test_a_stop_request_while_the_files_are_written_is_the_launch_scripts(tmp_path: Path) -> None:
    """It has the supervisor withdraw the run: half a run directory is not left behind."""
    flags = ["--device=cpu", "--depth=1", "--out_dir=runs", "--log_dir=logs", "--run_name=r"]
    done = python("-c", LATE, ENHANCED, *flags, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path}/runs/r\n", "")
    assert (tmp_path / "runs/r/plan.json").exists()


TWICE = """
import os, signal, sys
from training.host import process
try:
    with process.stoppable():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
except process.StopAsked as asked:
    os.kill(os.getpid(), signal.SIGTERM)
    sys.exit(75 if asked.number == signal.SIGTERM else 1)
"""


def test_a_stop_request_that_arrives_twice_is_one(tmp_path: Path) -> None:
    """A process group gets it, and the launch script passes it on."""
    assert python("-c", TWICE, cwd=tmp_path).returncode == 75
    unused = TWICE.replace("        os.kill", "        pass  #", 1).replace(
        "signal.pause()", "pass"
    )
    unused += "os.kill(os.getpid(), signal.SIGTERM)\n"
    assert python("-c", unused, cwd=tmp_path).returncode == -signal.SIGTERM, "restored"
