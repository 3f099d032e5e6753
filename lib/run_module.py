"""`python lib/run_module.py training.cli.plan ARGS…`: like `python -m`, but ignores a folder named
`training` in the current directory, and prints no traceback for an early Ctrl-C. Runs with any
Python >= 3.10."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time

ONE_REQUEST_S = 1.0
_interrupted = float("-inf")


def interrupt(number: int, frame: object) -> None:
    """Ctrl-C reaches this process and the launch script, which passes it on: one request."""
    global _interrupted
    before, _interrupted = _interrupted, time.monotonic()
    if _interrupted - before > ONE_REQUEST_S:
        raise KeyboardInterrupt


if __name__ == "__main__":
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # in place of the folder of this file, which PYTHONSAFEPATH leaves out
    sys.path[: 0 if getattr(sys.flags, "safe_path", False) else 1] = [root]
    module = sys.argv.pop(1)
    if os.environ.pop("DUET_CTRL_C", ""):  # a shell ignores it in a process substitution
        signal.signal(signal.SIGINT, interrupt)
    if os.getpid() == 1:  # the kernel keeps default actions from the first process of a container
        from training.host import process

        process.exit_on_stop()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        sys.exit(130)
