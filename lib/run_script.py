"""Runs a user's program like `python WORDS…` and records how it ends:

    python -u run_script.py FOLDER SCRIPT ARGS…
    python -u run_script.py FOLDER -m MODULE ARGS…

FOLDER/rank<r>.error.json  the exception that ended it, or a nonzero sys.exit
FOLDER/rank<r>.ended       time of a normal end, and the line of a sys.exit(0)
FOLDER/rank<r>.stacks      Python stacks of all threads, on SIGUSR2 and at a crash

Standard library only, Python >= 3.8: it runs in the script's environment. Transparent to the
script: same sys.argv, __main__, exit status and traceback (lib/main_program.py); only sys.path has
one more folder at its end (docs/inspection.md).
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib.util
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
import types
from pathlib import Path

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PROGRAM = os.path.join(_ROOT, "lib", "main_program.py")
_DUET = tuple(os.path.join(_ROOT, folder, "") for folder in ("lib", "training"))
STOPPED = (75, 130)  # exit statuses of a stop on request (training/core/errors.py)
_status = None  # type: int | None # exit status of a finished script
_interrupted = []  # type: list[int] # this process, once a KeyboardInterrupt has ended the script
# Types whose objects may stay until the end: a destructor may use them
_NOTHING_TO_CLOSE = (
    *(types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType),
    *(str, bytes, int, float, Path),
)
CHAIN = 10  # most exceptions of a recorded chain
SIGCHLD_S = 0.2
FULL = (28, 122)  # ENOSPC, EDQUOT


def main() -> None:
    folder, words = sys.argv[1], sys.argv[2:]
    program = _load("duet_main_program", "lib", "main_program.py")
    script = program.name(words)
    rank = os.environ.get("RANK", "0")
    base = os.path.join(folder, "rank" + rank)
    # Never closed: the signal handler writes to the descriptor.
    stacks = open(base + ".stacks", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    _load("duet_crash_stacks", "training", "core", "crash_stacks.py").write_to(stacks)
    # data-loader workers do not inherit it
    os.register_at_fork(after_in_child=_allow_tracing)
    sys.meta_path.insert(0, _AtDistributed(folder, int(rank)))
    _offer_inspection(folder, base, int(rank), script)
    # registered first, so called last
    atexit.register(_leave, os.getpid())
    own = os.getpid()  # a forked child of the script ends here as well
    try:
        program.execute(words)
    except SystemExit as leaving:
        if os.getpid() == own:
            # Python ends with 1 for any other object, also an empty one
            status = 0 if leaving.code is None else leaving.code
            if isinstance(status, int) and status in (0, *STOPPED):
                _end(base + ".ended", script, leaving)
            else:
                _keep(base + ".error.json", int(rank), script, leaving)
        raise
    except BaseException as error:
        last = error
        if os.getpid() == own:
            try:
                last = _final(error)
            except RuntimeError as later:  # of torch's SIGCHLD handler, which may run in any call
                last = _final(later)
            _keep(base + ".error.json", int(rank), script, last)
        _show(last)
        if isinstance(last, KeyboardInterrupt):
            _interrupted.append(os.getpid())
        sys.exit(1)
    if os.getpid() == own:
        _end(base + ".ended", script)


def _allow_tracing() -> None:
    """Allow other processes to read stacks where the kernel (Yama) restricts ptrace to parents."""
    # PR_SET_PTRACER, PR_SET_PTRACER_ANY
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)


def _offer_inspection(folder: str, base: str, rank: int, script: str) -> None:
    """Make training.inspector importable, also as duet_inspector."""
    launched = types.ModuleType("duet_launched")  # for training/inspector/reporting.py
    launched.__dict__.update(
        ranks=folder, keep=lambda error: _keep(base + ".error.json", rank, script, error)
    )
    sys.modules["duet_launched"] = launched
    # this folder contains nothing else; spawned processes inherit it
    sys.path.append(os.path.join(_ROOT, "lib", "pythonpath"))
    # Last in sys.meta_path: never hides the script's own package `training`, only adds a submodule
    # `inspector` to it.
    _load("_duet", "lib", "site", "_duet.py")


def _load(name: str, *path: str) -> types.ModuleType:
    """Load a file of Duet as a module without adding it to sys.modules."""
    spec = importlib.util.spec_from_file_location(name, os.path.join(_ROOT, *path))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_libraries = _load("duet_libraries", "training", "core", "libraries.py")


class _AtDistributed:
    """Import hook: when the script imports torch.distributed, starts the server that shows its
    collectives (training/trainer/flight_recorder_server.py)."""

    def __init__(self, folder: str, rank: int) -> None:
        self.folder, self.rank, self.done = folder, rank, False

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        # Stays in sys.meta_path: removing it during the iteration would skip the next finder.
        if name != "torch.distributed.distributed_c10d" or self.done:
            return
        self.done = True
        try:
            self._serve()
        except Exception as error:  # the script can train without the server
            print(
                f"rank {self.rank}: collectives cannot be inspected: "
                f"{type(error).__name__}: {error}",
                file=sys.stderr,
            )

    def _serve(self) -> None:
        server = _load(
            "duet_flight_recorder_server", "training", "trainer", "flight_recorder_server.py"
        )
        server.serve(Path(self.folder), self.rank)


def _leave(pid: int) -> None:
    """Exit without interpreter teardown after a normal end with a process group, once threads and
    the script's own atexit functions are done: with gloo, teardown aborts one in four times
    (SIGABRT: its threads outlive the interpreter). First the objects of the script and its modules
    are released, such as an archive that is complete only when closed, and all open files flushed.
    After a KeyboardInterrupt by its signal, like Python itself, which the launcher sees."""
    if os.getpid() in _interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # first: a further one may arrive
        _flush()
        os.kill(os.getpid(), signal.SIGINT)
    distributed = sys.modules.get("torch.distributed")
    if os.getpid() != pid or _status is None or not _has_group(distributed):
        return
    # a daemon thread that still runs would fail for want of its globals
    threading.excepthook = lambda args: None
    _release(sys.modules["__main__"].__dict__)
    # the latest import first, as in Python
    for module in reversed(list(sys.modules.values())):
        names = {}
        if issubclass(type(module), types.ModuleType):
            # `module.__dict__` would import a lazy module
            names = object.__getattribute__(module, "__dict__")
        if _is_of_script(names.get("__file__")):
            _release(names)
    gc.collect()
    if _flush():  # else left to Python, which reports it and sets the exit status
        os._exit(_status)


def _is_of_script(file: object) -> bool:
    """Is this the file of a module of the script's own code, neither a library's nor Duet's?"""
    return (
        isinstance(file, str) and not file.startswith(_DUET) and not _libraries.contain_here(file)
    )


def _release(names: "dict[str, object]") -> None:
    """Release the objects of a module. A destructor may use modules, functions, constants, and what
    was defined before its object."""
    for name in reversed(list(names)):
        # type(): a proxy whose object is gone raises for isinstance()
        if not name.startswith("__") and not issubclass(type(names.get(name)), _NOTHING_TO_CLOSE):
            names[name] = None


def _flush() -> bool:
    """Flush all open files; whether that succeeded."""
    done = True
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase):
            try:
                if not thing.closed and thing.writable():
                    thing.flush()
            except ValueError:  # closed or detached: nothing to flush
                continue
            except Exception:
                done = False
    return done


def _has_group(distributed: "types.ModuleType | None") -> bool:
    known = getattr(distributed, "is_initialized", None)  # missing in a torch without it
    return bool(known and known())


def _show(error: BaseException) -> None:
    """Print the traceback without Duet's frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, _PROGRAM):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _frames(error: BaseException) -> "list[traceback.FrameSummary]":
    # errors of the inspector and of its callbacks are attributed to the line that called them
    inspector = os.path.join(_ROOT, "training", "inspector", "")
    return [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if f.filename not in (__file__, _PROGRAM) and not f.filename.startswith(inspector)
    ]


def _own_frame(error: BaseException) -> "traceback.FrameSummary | None":
    """The innermost frame of the user's code."""
    frames = _frames(error)
    own = list(filter(_is_own, frames)) or frames
    return own[-1] if own else None


def _is_own(frame: "traceback.FrameSummary") -> bool:
    # code without a file, as of exec(): the line that executes it counts
    return not _libraries.contain_here(frame.filename)


def _where(script: str, error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename or script}:{error.lineno}"
    frame = _own_frame(error)
    return f"{frame.filename}:{frame.lineno}" if frame else ""


def _led_to(error: BaseException) -> "list[BaseException]":
    """The causes and contexts of this exception, latest first."""
    found: list[BaseException] = []
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while before is not None and len(found) < CHAIN:
        found.append(before)
        before = before.__cause__ or (None if before.__suppress_context__ else before.__context__)
    return found


def _placed(error: BaseException, before: "list[BaseException]") -> BaseException:
    """The exception whose line counts: that which a script, or a library such as Hydra, has caught
    before it calls sys.exit."""
    caught = before if isinstance(error, SystemExit) else []
    return next((one for one in caught if any(map(_is_own, _frames(one)))), error)


def _message(error: BaseException) -> str:
    """As a traceback shows it."""
    try:
        return str(error)
    except Exception:  # of the script's own __str__
        return "<exception str() failed>"


def _end(path: str, script: str, leaving: "SystemExit | None" = None) -> None:
    global _status
    status = int(leaving.code or 0) if leaving else 0
    where = _where(script, leaving) if leaving else ""
    _write(path, {"time": time.time(), "where": where, "status": status})
    _status = status


def _final(error: BaseException) -> BaseException:
    """The error to report. A killed data-loader worker is detected twice: by its connection, and by
    torch's SIGCHLD handler, whose message is more specific: wait for that one. Then without the
    handler, which must not raise while the error is recorded."""
    handler = signal.getsignal(signal.SIGCHLD)
    if getattr(handler, "__module__", "") != "torch.utils.data._utils.signal_handling":
        return error
    try:
        if isinstance(error, (ConnectionError, EOFError)):
            time.sleep(SIGCHLD_S)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except RuntimeError as found:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        found.__context__ = error
        return found
    return error


def _keep(path: str, rank: int, script: str, error: BaseException) -> None:
    before = _led_to(error)
    placed = _placed(error, before)
    frame = _own_frame(placed)
    facts = {
        "rank": rank,
        "guilty_rank": error.guilty_rank
        if type(error).__name__ == "InspectionError" and hasattr(error, "guilty_rank")
        else rank,
        "time": time.time(),
        "type": type(error).__name__,
        "message": _message(error),
        "where": _where(script, placed),
        "code": frame.line if frame else None,
        "before": [{"type": type(one).__name__, "message": _message(one)} for one in before],
        "phase": None,
        "disk_full": isinstance(error, OSError) and error.errno in FULL,
        "traceback": traceback.format_exception(type(error), error, error.__traceback__),
    }
    if file := _file(error):
        facts["file"] = file
    if isinstance(pid := getattr(error, "error_pid", None), int):
        facts["pid"] = pid  # of the process of torch.multiprocessing that has failed
    _write(path, facts)


def _file(error: BaseException) -> str:
    """The file of an operating system's error; of a copy the target. '' unknown."""
    found = error if isinstance(error, OSError) else _full_disk(error)
    named = (found.filename2 or found.filename) if found else None
    return os.path.abspath(named) if isinstance(named, str) else ""


def _full_disk(error: BaseException) -> "OSError | None":
    """The full disk from which another error was raised, such as one of torch.compile."""
    before: BaseException | None = error
    for _ in range(CHAIN):
        if before is None or (isinstance(before, OSError) and before.errno in FULL):
            return before
        inner = getattr(before, "inner_exception", None)
        before = inner or before.__cause__ or before.__context__
    return None


def _write(path: str, facts: "dict[str, object]") -> None:
    try:
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            json.dump(facts, file, indent=1)
        os.replace(path + ".tmp", path)
    except OSError as problem:  # must not change how the script ends
        # the launcher looks for it (training/launcher/output.py)
        what = "; {type}: {message} at {where}".format(**facts) if "type" in facts else ""
        what = " ".join(what.split())
        print(f"{path} cannot be written: {problem.strerror}{what}", file=sys.stderr)


if __name__ == "__main__":
    main()
