"""Python stacks of running processes, taken from outside by py-spy: the process needs no support
for it and is not stopped.

Works for stopped processes and for those that hold the GIL in C too: py-spy only reads their
memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from training.core import libraries
from training.core.jsonl import Record
from training.core.messages import msg
from training.host import env_vars, packages
from training.watchdog.probes import procfs

AT_ONCE = 16  # concurrent dumps on as many cores
# At least: a process that cannot be read takes all of its time.
AT_LEAST = 4
TRIES = 3  # reading a changing stack may fail
_HEADER = re.compile(
    r"(Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):"
)
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')

_HERE = Path(__file__).resolve().parents[3]
BARRIERS = str(_HERE / "training/inspector/distributed.py")
_STARTERS = tuple(
    str(_HERE / "lib" / name) for name in ("run_script.py", "main_program.py", "run_module.py")
)
_PLUMBING = (BARRIERS, *_STARTERS)
# What a rank does between an exception and its exit: its report, and a wait for its checkpoint.
_REPORTS = str(_HERE / "training/trainer/error_file.py")
_WAITS = (str(_HERE / "training/trainer/async_checkpoint.py"), "__exit__")


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str  # with its class where Python reports it (3.11 and later)

    @property
    def name(self) -> str:
        """The function name alone."""
        return self.function.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


@dataclass(frozen=True)
class Thread:
    name: str
    main: bool
    active: bool  # on a CPU, or ready for one; unknown from faulthandler
    holds_gil: bool  # unknown from faulthandler
    frames: tuple[Frame, ...]  # innermost first
    current: bool = False  # the one that crashed; only from faulthandler
    number: int = 0  # Linux's; 0: unknown


@dataclass(frozen=True)
class Stack:
    pid: int  # 0: unknown
    source: str  # py-spy or faulthandler
    threads: tuple[Thread, ...]

    @property
    def main(self) -> Thread | None:
        return next((thread for thread in self.threads if thread.main), None)

    @property
    def crashed(self) -> Thread | None:
        """The main thread if Python does not know the one that crashed, a library's own."""
        return next((one for one in self.threads if one.current and one.frames), self.main)

    def text(self) -> str:
        """The stack as text for a file, the main thread first."""
        lines = [f"pid {self.pid or msg('watchdog.stack.unknown_pid')} ({self.source})"]
        for thread in sorted(self.threads, key=lambda thread: not thread.main):
            marks = [
                text
                for text, so in (
                    (msg("watchdog.stack.main"), thread.main),
                    (msg("watchdog.stack.running"), thread.active),
                    (msg("watchdog.stack.gil"), thread.holds_gil),
                )
                if so
            ]
            name = (
                msg("watchdog.stack.thread", name=thread.name)
                if thread.name
                else msg("watchdog.stack.unnamed_thread")
            )
            lines.append(name + (f" [{', '.join(marks)}]" if marks else ""))
            lines += [f"    {frame}" for frame in thread.frames] or [
                msg("watchdog.stack.no_python")
            ]
        return "\n".join(lines) + "\n"


class _Complaint(str):
    """What py-spy reported instead of a stack: another try may succeed."""


def dump(pids: Iterable[int], seconds: float = 5.0) -> dict[int, Stack | str]:
    """Stacks of these processes; a text is the reason for none. Takes at most `seconds`: the first
    ones are read first, no more at once than cores, or none of many would end in time."""
    wanted = list(dict.fromkeys(pids))
    program = packages.program("py-spy")
    if program is None:
        return dict.fromkeys(
            wanted,
            msg("watchdog.stack.no_py_spy", install=packages.install(["py-spy"])),
        )
    if not wanted:
        return {}
    end = time.monotonic() + seconds
    at_once = min(AT_ONCE, max(AT_LEAST, env_vars.cpu_count()), len(wanted))
    with ThreadPoolExecutor(at_once) as pool:
        return dict(
            zip(wanted, pool.map(lambda pid: _dump(program, pid, end), wanted), strict=True)
        )


def _dump(program: str, pid: int, end: float) -> Stack | str:
    answer: Stack | str = msg("watchdog.stack.no_time")
    for attempt in range(TRIES):
        # Stopping the process gives a consistent stack where reading alone failed, but it
        # interrupts a blocked call, which can dissolve the hang, and a stopped process cannot be
        # stopped again: the last resort.
        blocking = attempt == TRIES - 1
        before = procfs.read_process(pid)
        if before is None or before.state in "ZX":
            return msg("watchdog.stack.ended", pid=pid)
        if blocking and before.state in "TtD":
            break
        answer = _ask(program, pid, end, blocking)
        if blocking:
            _let_go(pid)
        if not isinstance(answer, _Complaint):
            break
    return answer


def _ask(program: str, pid: int, end: float, blocking: bool) -> Stack | str:
    left = end - time.monotonic()
    if left <= 0:
        return msg("watchdog.stack.timeout", pid=pid)
    command = [
        program,
        "dump",
        "--json",
        *([] if blocking else ["--nonblocking"]),
        "--pid",
        str(pid),
    ]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=left,
            check=False,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return msg("watchdog.stack.timeout", pid=pid)
    except OSError as error:
        return msg("watchdog.stack.no_start", program=program, strerror=error.strerror)
    if done.returncode == 0:
        try:
            return _parsed(pid, json.loads(done.stdout))
        except (ValueError, KeyError, TypeError):
            return _Complaint(msg("watchdog.stack.unreadable", pid=pid))
    return _reason(pid, done.stderr)


def _parsed(pid: int, threads: list[Record]) -> Stack:
    return Stack(
        pid,
        "py-spy",
        tuple(
            Thread(
                name=thread["thread_name"]
                or ("MainThread" if thread["os_thread_id"] == pid else ""),
                main=thread["os_thread_id"] == pid
                if thread["os_thread_id"]
                else thread["thread_name"] in ("MainThread", None),
                active=thread["active"],
                holds_gil=thread["owns_gil"],
                frames=_from_the_script(
                    Frame(frame["filename"], frame["line"], frame["name"])
                    for frame in thread["frames"]
                ),
                number=thread["os_thread_id"] or 0,
            )
            for thread in threads
        ),
    )


def _reason(pid: int, output: str) -> str:
    now = procfs.read_process(pid)
    if now is None or now.exits:
        return msg("watchdog.stack.ended", pid=pid)
    if re.search(r"permission denied|operation not permitted", output, re.I):
        return msg("watchdog.stack.not_allowed", pid=pid)
    if "find python version" in output or "find a python" in output.lower():
        return msg("watchdog.stack.not_python", pid=pid)
    lines = [
        line.strip() for line in output.partition("Stack backtrace")[0].splitlines() if line.strip()
    ]
    return _Complaint(
        msg(
            "watchdog.stack.complaint",
            pid=pid,
            lines="; ".join(lines)[:200] or msg("watchdog.stack.nothing"),
        )
    )


def _let_go(pid: int) -> None:
    """An interrupted py-spy may leave the process stopped, although it was not before."""
    now = procfs.read_process(pid)
    if now is not None and now.state == "T":
        with contextlib.suppress(OSError):  # it has exited meanwhile, or belongs to another user
            os.kill(pid, signal.SIGCONT)


def from_faulthandler(path: Path) -> Stack | None:
    """The last dump in a file to which faulthandler writes on each SIGUSR2
    (training.trainer.worker, lib/run_script.py)."""
    try:
        return in_dump(path.read_text(encoding="utf-8", errors="replace").splitlines())
    except OSError:
        return None


def in_dump(lines: Iterable[str]) -> Stack | None:
    """The last stack that faulthandler has written in these lines."""
    threads: list[tuple[str, str, bool, list[Frame]]] = []  # id, name, current, frames
    for line in lines:
        if header := _HEADER.match(line):
            threads.append((header[2], header[3] or "", header[1] != "Thread", []))
        elif threads and (frame := _FRAME.match(line)):
            threads[-1][3].append(
                Frame(frame[1], 0 if frame[2] == "???" else int(frame[2]), frame[3])
            )
    if not threads:
        return None
    # Python lists the newest thread first: the main thread is the last one of each dump.
    main = threads[-1][0]
    before = [number for number, (thread, *_) in enumerate(threads[:-1]) if thread == main]
    last = threads[before[-1] + 1 if before else 0 :]
    return Stack(
        0,
        "faulthandler",
        tuple(
            Thread(
                "MainThread" if thread == main else name,
                thread == main,
                False,
                False,
                _from_the_script(frames),
                current,
            )
            for thread, name, current, frames in last
        ),
    )


def in_launcher(line: str) -> bool:
    """Is this line of a dump a frame of the program that runs the script?"""
    frame = _FRAME.match(line)
    return frame is not None and frame[1] in _STARTERS


def _from_the_script(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """The frames without those of the launcher, as in the traceback of the script itself; innermost
    first."""
    kept = listed = list(frames)
    while kept and kept[-1].file in _STARTERS:
        kept = kept[:-1]
    return tuple(kept or listed)


def own(frames: Iterable[Frame]) -> Frame | None:
    """The innermost frame of the user's code; the innermost of all without one."""
    listed = list(frames)
    return next(filter(is_own, listed), listed[0] if listed else None)


def after_exception(frames: Iterable[Frame]) -> bool:
    """Has this thread of a rank raised before, so that its frames are not the place of the
    failure?"""
    return any(one.file == _REPORTS or (one.file, one.name) == _WAITS for one in frames)


def is_own(frame: Frame) -> bool:
    """Is it code of the user?"""
    return not libraries.contain(frame.file) and frame.file not in _PLUMBING
