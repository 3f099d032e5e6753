"""User programs in other forms than a Python file: shell scripts, compiled programs, programs with
processes of their own; large output."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import SCRIPTS, Script
from training.core.rundir import read_records

pytestmark = pytest.mark.soak


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_hang_behind_a_shell_script_is_named(script: Script, tmp_path: Path) -> None:
    faulty = SCRIPTS / "faulty.py"
    text = f"#!/bin/sh\necho starting\n'{sys.executable}' -u '{faulty}' \"$@\"\nexit $?\n"
    run = script(executable(tmp_path / "start.sh", text), "sleep", flags={"hang_timeout": 3})
    assert run.wait() == 5, run.output[-3000:]
    (verdict,) = (e for e in read_records(run.run.events) if e["event"] == "verdict")
    assert (verdict["kind"], verdict["rank"]) == ("hang", 0)
    assert verdict["where"].startswith(str(faulty))


@pytest.mark.parametrize("status", [0, 3])
def test_the_status_of_a_compiled_program_is_reported(
    script: Script, tmp_path: Path, status: int
) -> None:
    if not (compiler := shutil.which("cc")):
        pytest.skip("no C compiler")
    source = tmp_path / "program.c"
    source.write_text(
        "#include <stdio.h>\n#include <stdlib.h>\n"
        'int main(int n, char **v) { puts(getenv("RANK")); return atoi(v[1]); }\n'
    )
    subprocess.run([compiler, "-o", tmp_path / "program", source], check=True)
    run = script(tmp_path / "program", str(status))
    assert run.wait() == (4 if status else 0)
    if status:
        assert (run.failure["cause"], run.failure["status"]) == ("exit_status", status)


def test_processes_that_a_rank_forks_and_spawns(script: Script) -> None:
    run = script(
        "import multiprocessing, os, sys\n"
        "def double(number):\n"
        "    return 2 * number\n"
        "if __name__ == '__main__':\n"
        "    for method in ('fork', 'spawn', 'forkserver'):\n"
        "        with multiprocessing.get_context(method).Pool(2) as pool:\n"
        "            print(method, pool.map(double, [1, 2]), flush=True)\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        sys.exit(9)\n"
        "    print('child', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    ).ok()
    for text in ("fork [2, 4]", "spawn [2, 4]", "forkserver [2, 4]", "child 9"):
        assert text in run.output
    assert "[WARNING]" not in run.output


@pytest.mark.parametrize("block", ["(b'x' * 99 + b'\\n') * 10000", "os.urandom(1000000)"])
def test_large_output_is_complete(script: Script, tmp_path: Path, block: str) -> None:
    run = script(
        "import hashlib, os, sys\n"
        "digest = hashlib.md5()\n"
        "for _ in range(100):\n"
        f"    block = {block}\n"
        "    digest.update(block)\n"
        "    sys.stdout.buffer.write(block)\n"
        "with open(sys.argv[1] + os.environ['RANK'], 'w') as file:\n"
        "    file.write(digest.hexdigest())\n",
        str(tmp_path / "digest"),
    ).ok()
    for rank in range(2):
        written = hashlib.md5(run.run.rank_log(rank).read_bytes()).hexdigest()
        assert written == (tmp_path / f"digest{rank}").read_text()
    assert run.run.rank_log(0).read_bytes() in run.console.read_bytes()
    if "urandom" not in block:
        (log,) = run.logs.glob("*.log")
        assert log.read_bytes().count(b"x" * 99 + b"\n") == 1_000_000


def test_wandb_offline_on_every_rank(script: Script, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = script(
        "import os, wandb\n"
        "run = wandb.init(project='p', mode='offline', dir=os.path.dirname(__file__))\n"
        "run.log({'loss': 0.5})\n"
        "run.finish()\n"
        "print('logged')\n"
    ).ok()
    assert all("logged" in run.run.rank_log(rank).read_text() for rank in range(2))
    assert len(list((tmp_path / "run0/wandb").glob("offline-run-*"))) == 2
    assert "[WARNING]" not in run.output


def test_an_exception_in_a_thread_is_on_the_card_of_a_later_failure(script: Script) -> None:
    run = script(
        "import os, sys, threading\n"
        "def work():\n"
        "    raise ValueError('planted')\n"
        "if os.environ['RANK'] == '0':\n"
        "    thread = threading.Thread(target=work, name='writer')\n"
        "    thread.start()\n"
        "    thread.join()\n"
        "    sys.exit(3)\n"
        "import time\n"
        "time.sleep(600)\n"
    )
    assert run.wait() == 4
    path = run.run.path.parents[1] / run.run.name / "my script.py"
    assert (run.failure["status"], run.failure["where"]) == (3, f"{path}:8")
    said = f"Exception in thread writer: ValueError: planted; at {path}:3"
    assert run.failure["threads"] == {"0": said}
    (event,) = (e for e in read_records(run.run.events) if e["event"] == "warning")
    assert (event["code"], event["rank"]) == ("warning.thread_exception", 0)


def test_restarts_under_torchrun_are_counted(script: Script) -> None:
    run = script(
        "import os\n"
        "count = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('restart', count, 'of', os.environ['TORCHELASTIC_MAX_RESTARTS'])\n"
        "if count == '0' and os.environ['RANK'] == '1':\n"
        "    raise ValueError('planted')\n",
        flags={"retries": 2, "launcher": "torchrun"},
    ).ok()
    assert "restart 1 of 2" in run.output
