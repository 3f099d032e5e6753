"""Runs somebody's script as `python SCRIPT ARGS…` would, and keeps what it ends with:

    python -u run_script.py FOLDER SCRIPT ARGS…

FOLDER/rank<r>.error.json  the exception that ended it, or sys.exit with another status than 0
FOLDER/rank<r>.ended       when the script came to its end, and the line of a sys.exit(0)
FOLDER/rank<r>.stacks      Python stacks of all threads, after SIGUSR2 and at a crash

Standard library only, Python >= 3.8: it runs in the script's own environment. The script is not
changed and sees nothing of it: same sys.argv, __main__, exit status and traceback; sys.path has one
more folder at its end, for who wants docs/inspection.md.
"""

import atexit
import builtins
import ctypes
import faulthandler
import gc
import importlib.util
import io
import json
import os
import signal
import sys
import time
import traceback
import types
from pathlib import Path

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STOPPED = (75, 130)  # statuses of a script that was asked to stop (training/core/errors.py)
_status: "int | None" = None  # exit status of a script that came to its end
CHAIN = 10  # exceptions that led to one another, at most


def main() -> None:
    folder, script = sys.argv[1], sys.argv[2]
    rank = os.environ.get("RANK", "0")
    base = os.path.join(folder, "rank" + rank)
    # Open for the whole life of the process: the signal handler writes to the descriptor.
    stacks = open(base + ".stacks", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks, all_threads=True)
    # its data-loader workers do not inherit that
    os.register_at_fork(after_in_child=_allow_tracing)
    sys.meta_path.insert(0, _AtDistributed(folder, int(rank)))
    _offer_inspection(folder, base, int(rank), script)
    sys.argv = sys.argv[2:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    module = types.ModuleType("__main__")
    module.__file__ = script
    module.__builtins__ = builtins  # type: ignore[attr-defined]
    # What pickles its classes, or starts processes by spawn, looks for the script there.
    sys.modules["__main__"] = module
    # the first to be registered is the last to be called
    atexit.register(_leave, os.getpid())
    own = os.getpid()
    try:
        with open(script, "rb") as file:
            code = compile(file.read(), script, "exec")
        exec(code, module.__dict__)
    except SystemExit as leaving:
        if os.getpid() == own:  # a forked child unwinds through here as well
            status = leaving.code or 0
            if status == 0 or status in STOPPED:
                _end(base + ".ended", script, leaving)
            else:
                _keep(base + ".error.json", int(rank), script, leaving)
        raise
    except BaseException as error:
        if os.getpid() == own:
            _keep(base + ".error.json", int(rank), script, error)
        _show(error)
        # As Python itself ends: KeyboardInterrupt by its signal, so that the launcher sees it.
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(1)
    _end(base + ".ended", script)


def _allow_tracing() -> None:
    """Its stacks may be read from outside, also where the kernel (Yama) allows that to parents
    only."""
    # PR_SET_PTRACER, PR_SET_PTRACER_ANY
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)


def _offer_inspection(folder: str, base: str, rank: int, script: str) -> None:
    """The script may import training.inspector, and duet_inspector, which is the same."""
    launched = types.ModuleType("duet_launched")  # for training/inspector/reporting.py
    launched.__dict__.update(
        ranks=folder, keep=lambda error: _keep(base + ".error.json", rank, script, error)
    )
    sys.modules["duet_launched"] = launched
    # there is nothing else in it; spawned processes get it too
    sys.path.append(os.path.join(_ROOT, "lib", "pythonpath"))
    # Asked last: a `training` of the script's own project is never hidden, and only gets a
    # submodule `inspector`.
    _load("_duet", "lib", "site", "_duet.py")


def _load(name: str, *path: str) -> types.ModuleType:
    """A file of Duet as a module that nothing else can import."""
    spec = importlib.util.spec_from_file_location(name, os.path.join(_ROOT, *path))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _AtDistributed:
    """When the script imports torch.distributed, the collectives that it calls can be seen from
    outside (training/trainer/flight_recorder_server.py)."""

    def __init__(self, folder: str, rank: int) -> None:
        self.folder, self.rank, self.done = folder, rank, False

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        # Stays in sys.meta_path: whoever leaves it while it is walked through makes Python skip the
        # next one.
        if name != "torch.distributed.distributed_c10d" or self.done:
            return
        self.done = True
        try:
            self._serve()
        except Exception as error:  # whatever it is, the script can be trained without
            print(
                f"rank {self.rank}: its collectives can not be seen from outside: "
                f"{type(error).__name__}: {error}",
                file=sys.stderr,
            )

    def _serve(self) -> None:
        server = _load(
            "duet_flight_recorder_server", "training", "trainer", "flight_recorder_server.py"
        )
        server.serve(Path(self.folder), self.rank)


def _leave(pid: int) -> None:
    """After the script's end, its threads and its own atexit functions: leave without tearing the
    interpreter down, where that is known to abort (SIGABRT, one in four with gloo: its threads
    outlive the interpreter that they call). Nothing written is lost."""
    if os.getpid() != pid or "torch.distributed" not in sys.modules or _status is None:
        return
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase):
            try:
                if not thing.closed and thing.writable():
                    thing.flush()
            except OSError:  # Python tells it, and has a status of its own for it
                return
            except ValueError:  # closed or detached: it holds nothing
                continue
    os._exit(_status)


def _show(error: BaseException) -> None:
    """The traceback from the script on, without this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _own_frame(error: BaseException) -> "traceback.FrameSummary | None":
    """The innermost line of the user's own code."""
    # the script's line that called it says more
    ours = (
        __file__,
        os.path.join(_ROOT, "training", "inspector", "inspector.py"),
    )
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in ours]
    own = [
        f
        for f in frames
        if "site-packages" not in f.filename
        and os.sep + "lib" + os.sep + "python" not in f.filename
    ] or frames
    return own[-1] if own else None


def _where(script: str, error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename or script}:{error.lineno}"
    frame = _own_frame(error)
    return f"{frame.filename}:{frame.lineno}" if frame else ""


def _led_to(error: BaseException) -> "list[dict[str, str]]":
    """The exceptions that led to this one, the last one first."""
    found: list[dict[str, str]] = []
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while before is not None and len(found) < CHAIN:
        found.append({"type": type(before).__name__, "message": str(before)})
        before = before.__cause__ or (None if before.__suppress_context__ else before.__context__)
    return found


def _end(path: str, script: str, leaving: "SystemExit | None" = None) -> None:
    global _status
    status = int(leaving.code or 0) if leaving else 0
    where = _where(script, leaving) if leaving else ""
    _write(path, {"time": time.time(), "where": where, "status": status})
    _status = status


def _keep(path: str, rank: int, script: str, error: BaseException) -> None:
    frame = _own_frame(error)
    facts = {
        "rank": rank,
        "guilty_rank": error.guilty_rank
        if type(error).__name__ == "InspectionError" and hasattr(error, "guilty_rank")
        else rank,
        "time": time.time(),
        "type": type(error).__name__,
        "message": str(error),
        "where": _where(script, error),
        "code": frame.line if frame else None,
        "before": _led_to(error),
        "phase": None,
        "disk_full": isinstance(error, OSError) and error.errno in (28, 122),  # ENOSPC, EDQUOT
        "traceback": traceback.format_exception(type(error), error, error.__traceback__),
    }
    _write(path, facts)


def _write(path: str, facts: "dict[str, object]") -> None:
    try:
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            json.dump(facts, file, indent=1)
        os.replace(path + ".tmp", path)
    except OSError as problem:  # the script's own end matters more
        print(f"{path} can not be written: {problem.strerror}", file=sys.stderr)


if __name__ == "__main__":
    main()
