"""Kills the processes of a supervisor that died (`kill -9`). Usage: guardian.py TOKEN; standard
input is a pipe whose other end only the supervisor holds, so it closes when the supervisor ends for
any reason. Standard library only."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from training.host import process

if __name__ == "__main__":
    process.outlive_terminal()
    process.ignore_stop_signals()
    while os.read(0, 1):  # nothing is ever written
        pass
    process.sweep(sys.argv[1])
