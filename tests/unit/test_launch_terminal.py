"""The pseudo-terminal of the first rank, in place of the user's."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import sys
import termios

import pytest

from tests.unit.test_launch_attempt import PLAN
from training.core.rundir import RunDir
from training.launcher import spawn
from training.launcher.attempt import Attempt
from training.launcher.local_ranks import LocalRanks

PROGRAM = """
import os, signal
def drawn_again(*_):
    os._exit(os.get_terminal_size(1).columns)
signal.signal(signal.SIGWINCH, drawn_again)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.usefixtures("handlers")
def test_it_follows_the_size_of_the_terminal(run: RunDir, token: str) -> None:
    """Programs with a handler for it draw again, others see the size with the next line."""
    tried = Attempt(run, PLAN, LocalRanks(range(1), 1), token)
    kept, (main, terminal) = os.dup(1), os.openpty()
    os.dup2(terminal, 1)
    try:
        child = spawn.start_watched([sys.executable, "-I", "-S", "-c", PROGRAM], token)
        tried.children.alive = {child.pidfd: child}
        assert os.read(child.outputs[1], 100).startswith(b"ready")
        fcntl.ioctl(main, termios.TIOCSWINSZ, struct.pack("4H", 24, 50, 0, 0))
        with tried._signals as signals:
            os.kill(os.getpid(), signal.SIGWINCH)
            tried.stop.on_signal(signals.fd)
        status = child.popen.wait(30)
    finally:
        os.dup2(kept, 1)
        signal.signal(signal.SIGWINCH, signal.SIG_DFL)
    for fd in (kept, main, terminal, child.pidfd, *child.outputs.values()):
        os.close(fd)
    assert status == 50
