"""A failure whose files cannot be written, or seem to be old, still reaches the user."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_launch_attempt import PLAN
from training.core.errors import Exit
from training.core.project import ROOT
from training.core.rundir import RunDir
from training.launcher import failure_report, supervisor
from training.launcher.backlog import Backlog
from training.launcher.outcome import Outcome
from training.launcher.output import RankOutput
from training.launcher.post_run import PostRun
from training.launcher.stop_signals import StopSignals

SCRIPT = """import shutil, sys
shutil.rmtree(sys.argv[1])
raise ValueError("bad\\n  sample; 17")
"""
TEXT = "ValueError: bad sample; 17 at {}:3"


def read(path: Path, printed: bytes, pieces: int) -> RankOutput:
    reader, writer = os.pipe()
    output = RankOutput(reader, path, None, backlog=Backlog())
    size = len(printed) // pieces + 1
    for begin in range(0, len(printed), size):
        os.write(writer, printed[begin : begin + size])
        assert output.drain()
    os.close(writer)
    output.close()
    return output


def test_an_exception_without_its_file_is_printed_and_found(tmp_path: Path) -> None:
    """The folder of the run was removed. The output arrives in pieces of any size."""
    script, folder = tmp_path / "main.py", tmp_path / "ranks"
    script.write_text(SCRIPT)
    folder.mkdir()
    program = [sys.executable, "-u", str(ROOT / "lib/run_script.py")]
    done = subprocess.run(
        [*program, str(folder), str(script), str(folder)],
        check=False,
        env={**os.environ, "RANK": "1"},
        stderr=subprocess.PIPE,
        timeout=60,
    )
    assert done.returncode == 1
    for pieces in (1, 2, 7, len(done.stderr)):
        output = read(tmp_path / "rank1.log", done.stderr, pieces)
        assert output.unwritten() == TEXT.format(script), pieces
    other = done.stderr.replace(b".error.json", b".ended")
    assert read(tmp_path / "rank1.log", other, 3).unwritten() == ""


def failed(text: str) -> Outcome:
    return Outcome(ours=False, guilty=(1, 1), here=(1, 1), unwritten={1: text})


def test_an_exception_without_its_file_is_on_the_card(run: RunDir) -> None:
    record = failure_report.failure(failed(TEXT.format("main.py")), run, PLAN)
    assert (record["cause"], record["kind"], record["rank"]) == ("exception", "error", 1)
    assert (record["summary"], record["where"]) == ("ValueError: bad sample; 17", "main.py:3")
    full = failure_report.failure(failed("OSError: [Errno 28] No space left at a.py:1"), run, PLAN)
    assert full["cause"] == "disk_full"


def test_a_failure_that_seems_to_be_older_than_its_run_is_sent(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock was set back; a full disk has the same effect, without the file."""

    class Failed:
        def __init__(self, *_: Any, signals: StopSignals) -> None: ...

        def go(self) -> Outcome:
            return failed(TEXT.format("main.py"))

    monkeypatch.setattr(supervisor, "Attempt", Failed)
    sent = run.path / "sent"
    plan: Any = PLAN | {
        "config": {"hang_timeout": 60, "notify": f"cat > {shlex.quote(str(sent))}"},
        "created": time.time() + 3600,
        "retries": {"value": 1},
        "place": {"node_rank": 0, "nnodes": 1},
        "script": {"path": "main.py", "args": [], "python": "python3"},
        "command": {"script": "launch_train.sh", "cwd": str(run.path)},
    }
    ending = PostRun(run, plan)
    ending.begun = True
    code = supervisor._attempts(run, plan, ending, set(), "")
    ending.close(code)
    facts = json.loads(sent.read_text())
    assert (code, facts["cause"], facts["rank"]) == (Exit.TRAINING, "exception", 1)
    assert facts["restarts"] == 1
    assert facts["text"] == "rank 1: ValueError: bad sample; 17 (exit 4)"
