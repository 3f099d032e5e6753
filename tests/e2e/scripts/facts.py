"""Writes what a program sees of its start to FOLDER/<rank>.json; the folder is the first argument.

Executed by plain Python, torchrun and Duet (test_conformance.py).
"""

import atexit
import gc
import inspect
import json
import locale
import multiprocessing
import os
import pickle
import resource
import signal
import stat
import sys
import threading
import warnings
from pathlib import Path


class Kept:
    pass


def kind(fd: int) -> str:
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return "closed"
    for name in ("FIFO", "CHR", "REG", "SOCK"):
        if getattr(stat, f"S_IS{name}")(mode):
            return "null" if os.fstat(fd).st_rdev == Path(os.devnull).stat().st_rdev else name
    return "other"


def spawned(queue: "multiprocessing.SimpleQueue[list[str]]") -> None:
    queue.put([__name__, Kept.__module__, __file__, sys.argv[0]])


def of_a_spawned_process() -> "list[str]":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=spawned, args=(queue,))
    process.start()
    process.join()
    # Python itself cannot spawn from every kind of program
    return queue.get() if process.exitcode == 0 else [f"exit code {process.exitcode}"]


def facts() -> "dict[str, object]":
    own = globals()
    main = sys.modules["__main__"]
    signals = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGPIPE", "SIGUSR1", "SIGCHLD")
    return {
        "file": __file__,
        "name": __name__,
        "package": __package__,
        "spec": own["__spec__"] and own["__spec__"].name,
        "loader": type(own["__loader__"]).__name__,
        "loads": getattr(own["__loader__"], "path", None),
        "cached": own.get("__cached__"),
        "doc": (__doc__ or "").split()[:3],
        "annotations": own.get("__annotations__", {}),
        "builtins": type(own["__builtins__"]).__name__,
        "names of __main__": sorted(n for n in vars(main) if n.startswith("__")),
        "argv": sys.argv,
        "orig_argv": [Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]],
        "path": sys.path,
        "flags": list(sys.flags),
        "executable": sys.executable,
        "cwd": os.getcwd(),
        "umask": os.umask(os.umask(0o22)),
        "stdin": kind(0),
        "stdout is stderr": os.path.sameopenfile(1, 2),
        "unbuffered": sys.stdout.write_through,
        "encoding": [sys.stdout.encoding, sys.stdout.errors, locale.getpreferredencoding()],
        "terminals": [stream.isatty() for stream in (sys.stdout, sys.stderr)],
        "signals": {
            name: str(signal.getsignal(getattr(signal, name))).partition(" at ")[0]
            for name in signals
        },
        "blocked signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "descriptors": len([f for f in os.listdir("/proc/self/fd") if int(f) > 2]),
        "threads": [thread.name for thread in threading.enumerate()],
        "nice": os.nice(0),
        "limits": [resource.getrlimit(n) for n in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "hooks": [
            sys.excepthook is sys.__excepthook__,
            sys.gettrace() is None,
            sys.displayhook is sys.__displayhook__,
            threading.excepthook.__module__,
        ],
        "warnings": len(warnings.filters),
        "gc": [gc.isenabled(), gc.get_threshold()],
        "source": inspect.getsource(Kept).split(),
        "pickles": type(pickle.loads(pickle.dumps(Kept()))) is Kept,
        "start method": multiprocessing.get_start_method(),
        "spawned": of_a_spawned_process(),
        "environment": dict(os.environ),
    }


if __name__ == "__main__":
    atexit.register(print, "at exit")
    found = facts()
    rank = os.environ.get("RANK", "0")
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
    print(f"to stdout {rank}")
    print(f"to stderr {rank}", file=sys.stderr)
