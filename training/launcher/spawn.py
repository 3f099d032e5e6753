"""Start the processes of a run: each in its own session, with its own output pipe, killed when the
supervisor dies."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from training.config.resolve import INTERNAL
from training.core import log, rundir
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.host import numa, process, topology
from training.launcher.child import Child, copy_size
from training.launcher.local_ranks import LocalRanks

if TYPE_CHECKING:
    from training.core.contracts.plan import BindingRecord, NumaRecord

# Files that a rank writes for one attempt. Its log is kept and appended to.
PER_ATTEMPT = re.compile(r"rank(\d+)\.(bin|error\.json|stacks|ended|sock|torchelastic\.json)")


def remove_stale(run: rundir.RunDir, stale: Callable[[int], bool]) -> None:
    """Remove the files that these ranks wrote in an earlier attempt: they would be taken for this
    attempt's."""
    for path in [*run.heartbeats.glob("rank*"), *run.ranks.glob("rank*")]:
        known = PER_ATTEMPT.fullmatch(path.name)
        if known and stale(int(known[1])):
            rundir.discard(path)


def clean_environment(ours: bool) -> dict[str, str]:
    """The environment without variables of an outer launcher or a shell profile, which would make
    them ranks of another run. A user script gets none of Duet's internal variables either."""
    private = {"DUET_SCRIPT"} if ours else INTERNAL
    return {
        name: value for name, value in topology.clean(os.environ).items() if name not in private
    }


def start_ranks(
    team: LocalRanks,
    command: list[str],
    token: str,
    *,
    ours: bool,
    labelled: bool = False,
    bound: NumaRecord | None = None,
    more: Callable[[int], dict[str, str]],
) -> list[Child]:
    """Start this machine's ranks. `labelled`: the console shows several of them; `bound`: their
    NUMA nodes; `more`: further variables of a rank. Raises UserError, with none of them left."""
    children = list[Child]()
    for rank in team.ranks:
        env = clean_environment(ours) | team.variables(rank, ours=ours) | {process.TOKEN: token}
        env |= more(rank)
        inherited: tuple[int, ...] = ()
        if rank == 0 and team.store:
            env["DUET_STORE_FD"], inherited = str(team.store.fileno()), (team.store.fileno(),)
        binding = bound["value"][rank - team.ranks.start] if bound else None
        memory = bool(bound and bound["memory"])
        try:
            streams = Streams(ours, rank == team.ranks.start, labelled)
            children.append(
                _start(command, env, rank, streams, inherited, binding, memory, ours=ours)
            )
        except UserError:
            for child in children:
                child.signal_group(signal.SIGKILL)
                child.popen.wait()
                for fd in (child.pidfd, *child.outputs.values()):
                    os.close(fd)
            raise
    return children


def start_torchrun(
    team: LocalRanks,
    command: list[str],
    token: str,
    logs: Path,
    *,
    ours: bool,
    more: Mapping[str, str],
) -> Child:
    """One torchrun that starts this machine's ranks; it passes on the output of its first rank, and
    writes that of every rank to `logs`. `more`: variables of the ranks that torchrun would set to
    another value."""
    count, nodes = len(team.ranks), team.world_size // len(team.ranks)
    has_python = "python" in Path(command[0]).name
    python = command[0] if has_python else sys.executable
    if more:
        changes = [f"{name}={value}" for name, value in more.items()]
        program = ["--no-python", "env", *changes, *command]
    elif has_python:
        program = command[2:] if command[1] == "-u" else command[1:]
    else:
        program = ["--no-python", *command]
    argv = [
        python,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(count),
        "--master-addr",
        team.address,
    ]
    argv += [
        "--master-port",
        str(team.port),
        "--nnodes",
        str(nodes),
        "--node-rank",
        str(team.ranks.start // count),
    ]
    to_files = ",".join(f"{rank}:3" for rank in range(1, count))
    argv += ["--log-dir", str(logs), "--redirects", to_files or "0", *program]
    env = clean_environment(ours) | {process.TOKEN: token}
    return _start(argv, env, None, Streams(ours, first=False))


def start_watched(command: list[str], token: str) -> Child:
    """A command that starts ranks, in the environment of the user's shell."""
    env = {name: value for name, value in os.environ.items() if name not in INTERNAL}
    child = _start(command, env | {process.TOKEN: token}, None, Streams(False, first=True))
    child.launcher = Path(command[0]).name
    return child


def _start(
    argv: list[str],
    env: dict[str, str],
    rank: int | None,
    streams: Streams,
    inherited: tuple[int, ...] = (),
    binding: BindingRecord | None = None,
    memory: bool = False,
    *,
    ours: bool = False,
) -> Child:
    """Raises UserError: the kernel refuses it, such as a program for another processor, or when
    there are too many processes."""
    try:
        with process.passing_on(env[process.TOKEN]):
            popen = subprocess.Popen(
                argv,
                env=env,
                stdin=streams.stdin(),
                stdout=streams.writers.get(1, streams.writers.get(2)),
                stderr=streams.writers.get(2, streams.writers.get(1)),
                # Ctrl-C reaches the supervisor alone, which signals the ranks
                start_new_session=True,
                pass_fds=inherited,
                # Safe between fork and exec: other threads (Invitations) hold no lock of it.
                preexec_fn=functools.partial(  # noqa: PLW1509
                    _in_child, os.getpid(), rank is not None, ours, binding, memory
                ),
            )
    except OSError as error:
        _close(streams.readers)
        what = msg("launcher.spawn.refused", program=argv[0], strerror=error.strerror)
        raise _not_started(what, error) from None
    finally:
        _close(streams.writers)
    try:
        pidfd = process.exit_fd(popen.pid)
    except OSError as error:
        popen.kill()
        popen.wait()
        _close(streams.readers)
        raise _not_started(_unread(error), error) from None
    return Child(rank, popen, streams.readers, pidfd)


def _close(descriptors: Mapping[int, int]) -> None:
    for fd in descriptors.values():
        os.close(fd)


def _unread(error: OSError) -> str:
    return msg("launcher.spawn.unread", strerror=error.strerror)


def _not_started(what: str, error: OSError) -> UserError:
    fixes = ["ulimit -n 1024"] if error.errno == errno.EMFILE else []
    return UserError(Problem("rank.not_started", what, "", fixes), Exit.RESOURCES)


class Streams:
    """Standard input, output and error of one child. The output of Duet's own training is joined; a
    script keeps both, and its first rank reads the launcher's input. Raises UserError: this process
    may open no more files."""

    def __init__(self, ours: bool, first: bool, labelled: bool = False) -> None:
        self._reads = first and not ours
        # Programs move the cursor on a terminal: that needs the console for one rank alone.
        on_terminal = first and not labelled
        terminals = [number for number in (1, 2) if on_terminal and os.isatty(number)]
        # One terminal for both keeps their order.
        numbers = (2,) if ours else (1,) if len(terminals) == 2 else (1, 2)
        self.readers: dict[int, int] = {}
        self.writers: dict[int, int] = {}
        try:
            for number in numbers:
                self.readers[number], self.writers[number] = (
                    _terminal_like(number) if number in terminals else os.pipe()
                )
        except OSError as error:
            _close(self.readers)
            _close(self.writers)
            raise _not_started(_unread(error), error) from None

    def stdin(self) -> int | None:
        """None: inherited. A job in the background would take what is typed for the shell."""
        with contextlib.suppress(OSError):  # closed
            os.fstat(0)
            if self._reads and (not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp()):
                return None
        return subprocess.DEVNULL


def _terminal_like(number: int) -> tuple[int, int]:
    """A pseudo-terminal as wide as the user's, so that a rank shows progress bars and colours; a
    pipe where the system has none (a chroot without /dev/pts, too many terminals)."""
    try:
        reader, writer = pty.openpty()
    except OSError as error:
        log.warning(msg("launcher.no_terminal", error=error))
        return os.pipe()
    _raw(writer)
    copy_size(number, writer)
    return reader, writer


def _in_child(
    parent: int, is_rank: bool, ours: bool, binding: BindingRecord | None, memory: bool
) -> None:
    process.die_with_parent(parent)
    if ours:  # until train.py handles them: Python itself would answer Ctrl-C with a traceback
        signal.pthread_sigmask(signal.SIG_BLOCK, process.STOP_SIGNALS)
    # A shell ignores these for its jobs in the background; the launcher passes on what counts.
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    if is_rank:
        # systemd ends a session by TERM and at once HUP to every process: a rank would not save.
        # Another launcher ends by it as in a shell.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if binding:
        node, text = binding["node"], ""
        try:
            if not numa.bind(binding["cores"], node, memory=memory):
                text = msg("launcher.numa.cores_only", node=node)
        except OSError as error:  # cores taken away since the plan: slower, not wrong
            text = msg("launcher.numa.unbound", node=node, error=error)
        if text:
            os.write(2, f"{text}\n".encode())
    process.allow_tracing()  # kept across exec: stacks of any program can be read


def _raw(terminal: int) -> None:
    """No translation of line ends: the log gets the bytes that the rank writes."""
    mode = termios.tcgetattr(terminal)
    mode[1] &= ~termios.OPOST
    termios.tcsetattr(terminal, termios.TCSANOW, mode)
