"""Python stacks at a crash, without hiding the crash from the kernel.

faulthandler ends the process by a second signal, which the kernel does not log. Here the handler
before it returns once, so that the faulting instruction is repeated with the default action: the
kernel logs the library (`segfault at … in libtorch_cpu.so`), and a core dump has the true place.

Standard library only, Python >= 3.8: lib/run_script.py loads it in the script's environment.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import types
import typing

OF_INSTRUCTIONS = (signal.SIGSEGV, signal.SIGILL, signal.SIGFPE)


def write_to(file: typing.IO[str]) -> None:
    """For the main thread. `file` is to stay open: the handler writes to its descriptor."""
    once = getattr(ctypes.CDLL(None), "sysv_signal", None)  # glibc
    if once is not None:
        once.restype, once.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
        for number in OF_INSTRUCTIONS:
            # None: PYTHONFAULTHANDLER or a library was first, and keeps its handler
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _sent)
                once(number, once(number, None))
    faulthandler.enable(file=file, all_threads=True)


def _sent(number: int, frame: types.FrameType | None) -> None:
    """Not by an instruction but by a process, so nothing is repeated. Called only then, since this
    needs the interpreter."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
