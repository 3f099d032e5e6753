"""Marks the processes of a launch, and has them ended should the supervisor be killed."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys

from training.asked import ROOT


class Guardian:
    """While it is entered, lib/guardian.py waits for this process to die. Gives the token that every process of the launch gets
    (training.host.process)."""

    def __enter__(self) -> str:
        token = secrets.token_hex(16)
        reader, self._writer = os.pipe()  # the writing end is inherited by nobody: it closes with this process
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", str(ROOT / "lib/guardian.py"), token],
                stdin=reader,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,  # Ctrl-C and a closed terminal do not reach it
            )
        finally:
            os.close(reader)
        return token

    def __exit__(self, *failure: object) -> None:
        os.close(self._writer)
        self._popen.wait()
