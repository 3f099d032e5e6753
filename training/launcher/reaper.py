"""Marks the processes of a launch; kills them if the supervisor is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

from training.core.project import ROOT
from training.host import process

NEEDED = ("LD_LIBRARY_PATH",)  # by a Python with its library in a folder of a module
LEAVES_S = 5.0  # its only work is one search for leftover processes


class Guardian:
    """While entered, lib/guardian.py waits for this process to die. Returns the token that every
    process of the launch carries (training.host.process)."""

    def __enter__(self) -> str:
        token = self._token = process.new_token()
        # the writing end is not inherited: it closes with this process
        reader, self._writer = os.pipe()
        try:
            with process.passing_on():  # of no launch: it outlives that around this process
                self._popen = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(ROOT / "lib/guardian.py"), token],
                    stdin=reader,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={n: os.environ[n] for n in NEEDED if n in os.environ},
                    cwd="/",
                    start_new_session=True,  # Ctrl-C and a closed terminal do not reach it
                )
        finally:
            os.close(reader)
        return token

    def __exit__(self, *failure: object) -> None:
        """Bounded: a guardian that is stopped (SIGSTOP) is continued; one that does not exit is
        killed, and its work is done here, as is that of one that could not start."""
        os.close(self._writer)
        self._popen.send_signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            if self._popen.wait(LEAVES_S) == 0:
                return
        self._popen.kill()
        # blocked in the kernel: it exits when the kernel lets it
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(LEAVES_S)
        process.sweep(self._token)
