"""Process lifetime: children die with their parent, and no process outlives its run.

Standard library only: lib/guardian.py uses it outside the environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from training.host import proc_memory

PR_SET_PDEATHSIG = 1
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1).value
# Every process of a launch inherits its token, even in a new session or with another parent: as an
# environment variable, and as the soft limit on file locks, which a cleared environment (`env -i`)
# does not remove. Linux ignores this limit from 2.4.25 on, and Python has no name for it.
TOKEN = "DUET_TOKEN"
RLIMIT_LOCKS = 10
LIMIT_LINE = "Max file locks"  # in /proc/PID/limits
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# They exit by themselves when the processes that they serve have exited: the first ones unlink the
# shared memory that those left in /dev/shm, the service of W&B writes the rest of its run.
UNLINKERS = (
    "multiprocessing.resource_tracker",
    "loky.backend.resource_tracker",
    "torch_shm_manager",
)
KEEPERS = (*UNLINKERS, "/wandb/bin/")
# Programs and modules that start ranks.
LAUNCHERS = (
    *("torchrun", "torch.distributed.run", "torch.distributed.launch"),
    *("accelerate", "accelerate-launch", "accelerate.commands.launch"),
    *("deepspeed", "deepspeed.launcher.runner", "deepspeed.launcher.launch"),
)
# Pools of torch.compile below a rank: idle when everything is compiled.
COMPILERS = ("/torch/_inductor/compile_worker/", "/torch/_inductor/__autotune_main__.py")
# They may outlive a rank by a moment without a warning.
HELPERS = (
    *KEEPERS,
    "multiprocessing.forkserver",
    *COMPILERS,
)
# Sets of strings have the same order in every process of a task.
HASH_SEED = ("PYTHONHASHSEED", "0")
# variables of a batch job: of SLURM, LSF, PBS, Grid Engine, HTCondor
BATCH_JOB = {"SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "SGE_TASK_ID", "_CONDOR_SLOT"}
# for KEEPERS to end; for UNLINKERS since they last worked or waited for a CPU, within the second
TIDYING_S, LONGEST_TIDYING_S = 2.0, 30.0
LOOK_S = 0.02
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent dies (Linux, prctl(2)). `parent`:
    its PID, to detect an earlier death."""
    if _libc.prctl(PR_SET_PDEATHSIG, number) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent is not None and os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def fix_sets() -> None:
    """Start this program again with HASH_SEED, which Python reads at its start, unless the user has
    chosen a value."""
    name, value = HASH_SEED
    if not os.environ.get(name):
        os.execve(sys.executable, sys.orig_argv, os.environ | {name: value})


def exit_fd(child: int) -> int:
    """A descriptor that becomes readable when this child exits, before it is waited for. Raises
    OSError if this process may open no more files."""
    try:
        return os.pidfd_open(child)
    except AttributeError:  # this Python was built for an older Linux, as that of conda is
        pass
    except OSError as error:  # a kernel before 5.3, or a sandbox
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
    reader, writer = os.pipe()

    def wait() -> None:
        with contextlib.suppress(ChildProcessError):  # waited for already
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        os.close(writer)

    # It holds no lock while it waits: code between fork and exec remains safe.
    threading.Thread(target=wait, daemon=True, name="duet-exit").start()
    return reader


class StopAsked(KeyboardInterrupt):
    """A stop signal before anything was started; Ctrl-C is Python's own KeyboardInterrupt.
    `number`: the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def raise_stop(number: int, frame: object) -> None:
    """A handler of TERM and USR1, for the first one: a process group and the launch script that
    passes it on make two of one request, and what follows must not be interrupted."""
    for one in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(one, signal.SIG_IGN)
    raise StopAsked(number)


def obeyed_stops() -> tuple[signal.Signals, ...]:
    """The stop signals that count for this process: not a Ctrl-C that was ignored at its start, as
    in a job of a script in the background. To be asked before the first stop signal, after which
    all are ignored."""
    ignores = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    return tuple(n for n in STOP_SIGNALS if not (ignores and n == signal.SIGINT))


def remember_stops() -> list[int]:
    """From now on stop signals only enter the list returned, while modules are imported; lib/run.sh
    has blocked them until here. A second Ctrl-C ends this process at once."""
    asked: list[int] = []

    def remember(number: int, frame: object) -> None:
        if number == signal.SIGINT and number in asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        asked.append(number)

    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, remember)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return asked


def hold_stops() -> None:
    """Stop signals wait until the program that replaces this one remembers them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """While this process waits: TERM and USR1 raise StopAsked, and so does the death of the launch
    script that waits for it. train.py may outlive the shell that has started it (nohup)."""
    before = {n: signal.signal(n, raise_stop) for n in (signal.SIGTERM, signal.SIGUSR1)}
    tied = "DUET_SCRIPT" in os.environ
    if tied:
        die_with_parent(number=signal.SIGTERM)
    try:
        yield
    finally:
        if tied:
            die_with_parent(number=0)
        for number, handler in before.items():
            if signal.getsignal(number) == raise_stop:  # none has arrived
                signal.signal(number, handler)


def outlive_terminal() -> None:
    """A closed terminal does not end this process; a handler is not inherited by its children."""
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


def exit_on_stop() -> None:
    """From now on TERM and a closed terminal end this process as Ctrl-C does: nothing half-written
    is left."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, _exit)


def _exit(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def allow_tracing() -> None:
    """Allow all processes of the user to read the stacks of this one and of its forked children
    (data-loader workers). With Yama (default on Ubuntu) only ancestors may, and py-spy is a
    sibling. The setting survives exec."""

    def allow() -> None:
        # Kernels without Yama reject the call and do not need it. Other obstacles are reported when
        # stacks are read.
        _libc.prctl(PR_SET_PTRACER, ctypes.c_ulong(PR_SET_PTRACER_ANY), 0, 0, 0)

    allow()
    os.register_at_fork(after_in_child=allow)


def die_of_stop_signals() -> None:
    """Silently, also of one since the start, which the launcher has blocked. The kernel keeps their
    default action from the first process of a container."""
    for number in obeyed_stops():
        signal.signal(number, _die if os.getpid() == 1 else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _die(number: int, frame: object) -> None:
    os._exit(128 + number)


def ignore_stop_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def new_token() -> str:
    """A random number in hex."""
    return os.urandom(16).hex()


def _as_limit(token: str) -> int:
    """A number in the range of limits that no user chooses."""
    return 1 << 60 | int(token[-14:], 16)


@contextlib.contextmanager
def passing_on(token: str = "") -> Iterator[None]:
    """While entered, processes are started with this token as their limit; without one, with that
    of no launch. The caller sets their variable."""
    soft, hard = resource.getrlimit(RLIMIT_LOCKS)
    _limit_locks(_as_limit(token) if token else hard, hard)
    try:
        yield
    finally:
        _limit_locks(soft, hard)


def _limit_locks(soft: int, hard: int) -> None:
    # ValueError: the hard limit is lower; OSError: a sandbox. The environment has the token too.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(RLIMIT_LOCKS, (soft, hard))


def marked(token: str) -> dict[int, str]:
    """Running processes started directly or indirectly with this token, without this one and
    without those of other users (sudo), which it may not end: PID → command line."""
    variable = f"{TOKEN}={token}".encode()
    limit = f"\n{LIMIT_LINE:25} {_as_limit(token)} ".encode()

    def carries(pid: int) -> bool:
        os.kill(pid, 0)  # PermissionError: another user's
        with contextlib.suppress(OSError):  # a sandbox without this file
            if limit in _read(pid, "limits"):
                return True
        return variable in proc_memory.read(pid, "environ").split(b"\0")

    return _living(carries)


def group(number: int) -> dict[int, str]:
    """Running processes of a process group: PID → command line."""
    return _living(lambda pid: int(_stat(pid)[2]) == number)


def children(parent: int) -> set[int]:
    """PIDs of the running processes that this one has started."""
    return set(_living(lambda pid: int(_stat(pid)[1]) == parent))


def ancestors() -> set[int]:
    """This process and those that have started it, directly or indirectly."""
    found, pid = set[int](), os.getpid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid and pid not in found:
            found.add(pid)
            pid = int(_stat(pid)[1])
    return found


def end_group(number: int) -> dict[int, str]:
    """Kill a process group except KEEPERS. Returns the killed processes except HELPERS."""
    killed = _kill(
        lambda: {
            pid: command for pid, command in group(number).items() if not _named(command, KEEPERS)
        }
    )
    return {pid: command for pid, command in killed.items() if not _named(command, HELPERS)}


def sweep(token: str) -> dict[int, str]:
    """End every process with this token; KEEPERS get TIDYING_S to end, UNLINKERS more on a busy
    machine. Returns the killed processes except HELPERS."""
    killed = _kill(
        lambda: {
            pid: command for pid, command in marked(token).items() if not _named(command, KEEPERS)
        }
    )
    begin = time.monotonic()
    end = begin + TIDYING_S
    while left := _without(marked(token), killed):
        now = time.monotonic()  # this process may have waited for a core, too
        if any(_named(command, UNLINKERS) and _works(pid) for pid, command in left.items()):
            end = min(now + TIDYING_S, begin + LONGEST_TIDYING_S)
        if now >= end:
            break
        time.sleep(LOOK_S)
    killed |= _kill(lambda: _without(marked(token), killed))
    return {pid: command for pid, command in killed.items() if not _named(command, HELPERS)}


def _kill(find: Callable[[], dict[int, str]]) -> dict[int, str]:
    """Kill all processes found, and repeat until there are no new ones: a process may have started
    another."""
    killed: dict[int, str] = {}
    while left := _without(find(), killed):
        for pid in left:
            # PermissionError: a process of another user, as of sudo
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= left
    return killed


def _without(found: dict[int, str], killed: dict[int, str]) -> dict[int, str]:
    return {pid: command for pid, command in found.items() if pid not in killed}


def _works(pid: int) -> bool:
    """Whether it uses a CPU or disk, or waits for one."""
    try:
        return _stat(pid)[0] in (b"R", b"D")
    except OSError:  # it has ended
        return False


def _named(command: str, names: tuple[str, ...]) -> bool:
    return any(name in command for name in names)


def _living(wanted: Callable[[int], bool]) -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        pid = int(name)
        try:
            if wanted(pid) and _stat(pid)[0] != b"Z":  # Z: dead, not yet reaped
                words = command(pid)
                if words:  # else it is exiting: its memory is released already
                    found[pid] = words
        except OSError:  # another user's process, or ended
            continue
    return found


def command(pid: int) -> str:
    """Its command line, or its name if it is stuck with the lock of its memory; "" when it is
    exiting. Raises OSError."""
    try:
        words = proc_memory.read(pid, "cmdline")
    except proc_memory.Blocked:
        words = _read(pid, "comm")
    return words.replace(b"\0", b" ").decode("utf-8", "replace").strip()


def _read(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()


def _stat(pid: int) -> list[bytes]:
    """State, parent, process group, session, …"""
    return _read(pid, "stat").rpartition(b")")[2].split()
