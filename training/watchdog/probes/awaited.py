"""What ends the wait of a process, also where its main thread waits for another thread."""

from __future__ import annotations

import re
from collections.abc import Collection

from training.watchdog.probes import procfs, stacks, system_calls
from training.watchdog.probes.stacks import Frame, Stack, Thread
from training.watchdog.probes.system_calls import CHILD, PEER
from training.watchdog.probes.waits import deciding, waits_for_worker

# Of pools: functions that wait for a task and execute it, and where they wait.
_POOL = re.compile(r"/(concurrent/futures/(thread|process)|multiprocessing/pool)\.py$")
_WORKERS = {"_worker", "_process_worker", "worker"}
_QUEUE = re.compile(r"/multiprocessing/(queues|connection)\.py$")
_FOR_TASKS = re.compile(r"/(concurrent/futures|asyncio)/|/multiprocessing/pool\.py$")
_LOOP = re.compile("/asyncio/")
_ZMQ = "ZMQbg/IO"  # its threads, which serve the sockets


def ends_by(pid: int, stack: Stack | str, to_ranks: Collection[int] = ()) -> str:
    """As system_calls.ends_by, for the deciding thread of a process; if it waits for another
    thread, for that one."""
    main = deciding(stack)
    own = system_calls.ends_by(pid, to_ranks, main.number if main else 0)
    if own or main is None or isinstance(stack, str):
        return own
    if any(frame.file.endswith("/subprocess.py") for frame in main.frames[:3]):
        return CHILD  # it polls the pipes of the child
    if system_calls.polls(pid, main.number) and any(
        name.startswith(_ZMQ) for name in procfs.threads(pid)
    ):
        return PEER
    others = stack.threads if _waits_for_thread(main) else ()
    ends = (_end(pid, one, to_ranks) for one in others if one.number not in (0, main.number))
    return next(filter(None, ends), "")


def in_pool(main: Thread) -> bool:
    """May it wait for the task of a pool?"""
    return _waits_for_thread(main) and any(_library(f, _FOR_TASKS) for f in main.frames)


def has_task(thread: Thread) -> bool:
    """Does this thread, or main thread, of a pool execute a task?"""
    calls = [f.name in _WORKERS and _library(f, _POOL) for f in thread.frames]
    return any(calls[1:]) and not calls[0] and not _library(thread.frames[0], _QUEUE)


def _end(pid: int, thread: Thread, to_ranks: Collection[int]) -> str:
    """Threads in the background wait for another process all the time, as those of trackers do, or
    sleep until their next turn. The main thread waits for tasks of a pool, and for a thread with
    the user's own code only if that waits for an answer."""
    end = system_calls.ends_by(pid, to_ranks, thread.number)
    if has_task(thread):
        return end
    if not any(stacks.is_own(frame) for frame in thread.frames) or waits_for_worker(thread):
        return ""
    return end if end in (PEER, CHILD) or system_calls.polls(pid, thread.number) else ""


def _waits_for_thread(main: Thread) -> bool:
    """In Python's `threading`, or in an event loop: not for a lock, which no thread may release."""
    if not main.frames or stacks.is_own(main.frames[0]):
        return False
    inside = main.frames[0].file.endswith("/threading.py")
    return inside or any(_library(frame, _LOOP) for frame in main.frames)


def _library(frame: Frame, path: re.Pattern[str]) -> bool:
    return not stacks.is_own(frame) and path.search(frame.file) is not None
