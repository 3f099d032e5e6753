"""Outlives a supervisor that is killed (`kill -9`), and ends what it has started. Usage:
guardian.py TOKEN, standard input a pipe whose other end the supervisor alone holds: it closes when
that ends, in whatever way. Standard library only."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from training.host import process

if __name__ == "__main__":
    process.ignore_stop_signals()
    while os.read(0, 1):  # nothing is ever written
        pass
    process.sweep(sys.argv[1])
