"""Start the processes of a run, each in a session of its own, with its own pipe, dying with the supervisor."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
from dataclasses import dataclass
from pathlib import Path

from training.errors import Exit, Problem, UserError
from training.host import ports, process
from training.request import ROOT

SCRUBBED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")
SCRUBBED_PREFIXES = ("PET_", "TORCHELASTIC_")
LOOPBACK = "127.0.0.1"


@dataclass
class Child:
    """One started process. `rank` is None for torchrun, which starts the ranks itself."""

    rank: int | None
    popen: subprocess.Popen[bytes]
    output: int  # what it writes arrives here
    pidfd: int  # readable when it has ended

    @property
    def name(self) -> str:
        return "torchrun" if self.rank is None else f"rank {self.rank}"

    def signal_group(self, number: signal.Signals) -> None:
        """To the process and everything it has started (its session); nothing when all is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def signal(self, number: signal.Signals) -> None:
        """To the process alone: the children decide for themselves."""
        self.popen.send_signal(number)


def clean_environment() -> dict[str, str]:
    """The environment without what an outer launcher or a shell profile left: it would make ranks of another run."""
    return {k: v for k, v in os.environ.items() if k not in SCRUBBED and not k.startswith(SCRUBBED_PREFIXES)}


def leaked() -> list[str]:
    return sorted(k for k in os.environ if k in SCRUBBED or k.startswith(SCRUBBED_PREFIXES))


def start_ranks(count: int, wanted_port: int, terminal: bool) -> list[Child]:
    """Start `count` ranks of train.py. With `terminal`, rank 0 gets a pseudo-terminal, so that it shows a progress bar."""
    if count == 1:
        return [_start([sys.executable, str(ROOT / "train.py")], clean_environment(), 0, terminal, ())]
    with socket.socket() as store:  # listening already: nobody can take the port in between; rank 0 inherits it
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(store, wanted_port)
        store.listen(2 * count)
        shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": LOOPBACK}
        shared["MASTER_PORT"] = str(store.getsockname()[1])
        children = []
        for rank in range(count):
            env = clean_environment() | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            inherited: tuple[int, ...] = ()
            if rank == 0:
                env["DUET_STORE_FD"], inherited = str(store.fileno()), (store.fileno(),)
            children.append(_start([sys.executable, str(ROOT / "train.py")], env, rank, terminal and rank == 0, inherited))
    return children


def _bind(store: socket.socket, wanted: int) -> None:
    """To the wanted port or, when it was taken since the plan, one of the next; 0 is any."""
    for port in range(wanted, wanted + ports.TRIES) if wanted else (0,):
        try:
            store.bind((LOOPBACK, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return
    text = f"port {wanted} (--master_port) and the next {ports.TRIES - 1} are taken; {wanted} by {ports.owner(wanted)}"
    raise UserError(Problem(text, "", ["leave --master_port out: a free port is chosen"]), Exit.RESOURCES)


def start_torchrun(count: int, wanted_port: int, logs: Path) -> Child:
    """One torchrun that starts `count` ranks; output of rank 0 comes through, every rank's goes to `logs`."""
    meeting = ["--master-addr", LOOPBACK, "--master-port", str(wanted_port)] if wanted_port else ["--standalone", "--local-addr", LOOPBACK]
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), *meeting]
    to_files = ",".join(f"{rank}:3" for rank in range(1, count))
    argv += ["--log-dir", str(logs), "--redirects", to_files or "0", str(ROOT / "train.py")]
    return _start(argv, clean_environment(), None, False, ())


def _start(argv: list[str], env: dict[str, str], rank: int | None, terminal: bool, inherited: tuple[int, ...]) -> Child:
    if terminal:
        ours, theirs = pty.openpty()
        _raw(theirs)
        size = fcntl.ioctl(sys.stderr, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)  # as wide as the user's terminal
    else:
        ours, theirs = os.pipe()
    try:
        popen = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which tells the ranks what to do
            pass_fds=inherited,
            # The supervisor has one thread, so code between fork and exec is safe.
            preexec_fn=functools.partial(process.die_with_parent, os.getpid()),  # noqa: PLW1509
        )
    finally:
        os.close(theirs)
    return Child(rank, popen, ours, os.pidfd_open(popen.pid))


def _raw(terminal: int) -> None:
    """No translation of line ends: what the rank writes is what the log gets."""
    mode = termios.tcgetattr(terminal)
    mode[1] &= ~termios.OPOST
    termios.tcsetattr(terminal, termios.TCSANOW, mode)
