"""The child processes that receive and send copies. The supervisor only starts them and looks
whether they have ended: no disk or network can block it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from training.core import exit_status
from training.core.jsonl import Record
from training.core.plain_text import one_line
from training.core.project import ROOT
from training.host import process

READ_BYTES = 1 << 14  # of its output, which has one line, or the traceback of an error
SHOWN = 200  # characters
LEAVES_S = 1.0


def start(module: str, task: Record, inherited: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """`task` has the secret, so it is not in the command line. Raises OSError."""
    popen = subprocess.Popen(
        (sys.executable, str(ROOT / "lib/run_module.py"), module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches the supervisor alone
        pass_fds=inherited,
        # Safe between fork and exec: other threads (Invitations) hold no lock of it.
        preexec_fn=functools.partial(process.die_with_parent, os.getpid()),  # noqa: PLW1509
    )
    assert popen.stdin
    with contextlib.suppress(BrokenPipeError):  # it has ended already, which `poll()` reports
        popen.stdin.write(json.dumps(task).encode() + b"\n")
        popen.stdin.close()
    return popen


def output(popen: subprocess.Popen[bytes]) -> str:
    """The last line of a child that has ended."""
    assert popen.stdout
    lines = popen.stdout.read(READ_BYTES).decode("utf-8", "replace").strip().split("\n")
    return lines[-1]


def why(popen: subprocess.Popen[bytes], line: str) -> str:
    """How it ended, with the last line of its output."""
    return " ".join([exit_status.how(popen.returncode), one_line(line)[:SHOWN]]).strip()


def end(popen: subprocess.Popen[bytes]) -> None:
    """One that a dead disk blocks cannot be killed: it is abandoned."""
    popen.terminate()
    try:
        popen.wait(LEAVES_S)
    except subprocess.TimeoutExpired:
        popen.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(LEAVES_S)
    for pipe in (popen.stdin, popen.stdout):
        if pipe:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
