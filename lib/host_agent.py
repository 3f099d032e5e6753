"""Runs the launch command of one machine for the launcher of several machines
(training/launcher/hosts): there under sshd, here as a child of that launcher.

host_agent.py [FD]   reads the command as one line of JSON, then a line for every signal or change,
                     and empty lines as keep-alive, from standard input, or from FD: then the
                     command has the terminal. Exits with the status of the command.
host_agent.py probe  prints one line of JSON: what this machine has

If the launcher or the connection dies, the input ends or stays silent: the command gets SIGTERM, so
that a checkpoint is saved, later a second one, and is killed then. It sends SIGUSR2 when the run
continues without the machine that coordinated it; if the launcher was lost with that machine, it
is left alone. Nothing on the command line: the environment may contain secrets. Standard library
only, Python >= 3.8.
"""

import ctypes
import functools
import hashlib
import json
import os
import platform
import select
import signal
import subprocess
import sys
import time
import typing

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LOST_S = 60.0  # without a line; the launcher sends one every 5 s
LOOK_S = 0.1
# after the first SIGTERM: a second one, which stops the ranks at once, and SIGKILL
SECOND_S, KILL_S = 30.0, 45.0
STEPS = ((0.0, signal.SIGTERM), (SECOND_S, signal.SIGTERM), (KILL_S, signal.SIGKILL))
# a machine that the run can lose: the one that coordinates gets SIGTERM if the launcher is lost for
# all
LONE = ((30.0, signal.SIGKILL),)
CONTINUES = signal.SIGUSR2
AGENT = "DUET_AGENT"  # variable of the command (training.host.hosts): PID of this process
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
NOT_STARTED = 127  # as a shell reports a command that cannot be executed
# A signal to the terminal's group, or to every process of a service, reaches the command by itself.
# It reaches this process within GROUP_S, unless the command has run for less than BEGIN_S.
GROUP_S, BEGIN_S = 0.2, 1.0
PR_SET_PDEATHSIG = 1
# end of a variable's name: where the devices are listed that its value may name
DEVICES = {"_SOCKET_IFNAME": "/sys/class/net", "NCCL_IB_HCA": "/sys/class/infiniband"}
SUFFIXES = (".py", ".json", ".sh")


class Input:
    """Lines from the launcher."""

    def __init__(self, fd: int) -> None:
        self.fd, self.open, self.heard = fd, True, time.monotonic()
        self._rest = b""

    def lines(self, seconds: float) -> "list[bytes]":
        """The lines that arrive within `seconds`; `open` is False after the last one."""
        if not self.open:
            time.sleep(seconds)
            return []
        if not select.select([self.fd], [], [], seconds)[0]:
            return []
        try:
            more = os.read(self.fd, 1 << 16)
        except OSError:
            more = b""
        self.open = bool(more)
        if more:
            self.heard = time.monotonic()
        *whole, self._rest = (self._rest + more).split(b"\n")
        return whole

    @property
    def lost(self) -> bool:
        return not self.open or time.monotonic() - self.heard > LOST_S


class Command:
    """The launch command. `here`: in the terminal's process group of the launcher, with its
    standard input; otherwise in a session of its own."""

    def __init__(self, order: "dict[str, typing.Any]", here: bool) -> None:
        self._group, self._began = not here, time.monotonic()
        self._process = subprocess.Popen(
            order["command"],
            cwd=order["folder"],
            env={**os.environ, **meant_here(order["environ"]), AGENT: str(os.getpid())},
            stdin=None if here else subprocess.DEVNULL,
            start_new_session=not here,
            # this process has no other thread
            preexec_fn=functools.partial(_begin, here),  # noqa: PLW1509
        )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def status(self) -> int:
        """As a shell reports it."""
        status = self._process.wait()
        return 128 - status if status < 0 else status

    def pass_on(self, number: int) -> None:
        """A signal of the launcher, unless the command got it as this process did."""
        both = signal.sigtimedwait({number}, GROUP_S) is not None
        if not both or time.monotonic() - self._began < BEGIN_S:
            self.signal(number)

    def signal(self, number: int) -> None:
        """Ctrl-C reaches the whole group, as in a terminal; other signals the command alone."""
        if self.ended:
            return
        if self._group and number in (signal.SIGINT, signal.SIGKILL):
            os.killpg(self._process.pid, number)
        else:
            self._process.send_signal(number)


def meant_here(sent: "dict[str, str]") -> "dict[str, str]":
    """Without devices that only the machine of the launcher has: this one has a value of its own,
    or chooses one."""
    return {name: value for name, value in sent.items() if not _is_elsewhere(name, value)}


def _is_elsewhere(name: str, value: str) -> bool:
    """NCCL's variables are lists of prefixes, with = of names, with ^ of those to exclude: it uses
    those that exist. Those of other libraries are lists of names, all of which must exist."""
    folder = next((DEVICES[end] for end in DEVICES if name.endswith(end)), "")
    if not folder or not value or value.startswith("^"):
        return False
    try:
        there = os.listdir(folder)
    except OSError:
        return False
    words = [word.partition(":")[0].strip() for word in value.lstrip("=").split(",")]
    wanted = [word for word in words if word]
    if not name.startswith("NCCL_"):
        return not set(wanted) <= set(there)
    if not value.startswith("="):
        there = [one[: len(word)] for one in there for word in wanted]
    return bool(wanted) and not set(wanted) & set(there)


def _begin(here: bool) -> None:
    """In the new process: no signal is blocked, and it dies with this one. In a session of its own
    it gets a Ctrl-C only from the launcher, which passes on what counts."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if not here:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def run(fd: int) -> int:
    here, stops = fd != 0, set(STOP_SIGNALS)
    if here and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a script's background job
        stops.remove(signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    # A lost connection is noticed as the end of the input. The command does not inherit handlers.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    followed = []  # type: list[float]
    signal.signal(CONTINUES, lambda *_: followed.append(time.monotonic()))
    source, arrived = Input(fd), []  # type: ignore[var-annotated]
    while not arrived:
        arrived = source.lines(1.0)
        if source.lost:  # the launcher died before the start
            return NOT_STARTED
    # A Ctrl-C in the terminal was for the command too.
    for number in signal.sigpending() & stops:
        return 128 + int(number)
    try:
        order = json.loads(arrived.pop(0))
        command = Command(order, here)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return NOT_STARTED
    lost_at = None  # type: float | None
    given = 0
    while not command.ended:
        for line in [*arrived, *source.lines(LOOK_S)]:
            message = json.loads(line) if line else {}
            if "signal" in message:
                command.pass_on(message["signal"])
            order["lone"] = message.get("lone", order.get("lone"))
        arrived = []
        if source.lost:
            lost_at = lost_at or time.monotonic()
            steps = STEPS  # type: tuple[tuple[float, int], ...]
            if order["lone"]:  # with the machine before, the launcher was lost too
                steps = () if followed and followed[-1] > source.heard else LONE
            given = _insist(command, steps, time.monotonic() - lost_at, given)
    return command.status()


def _insist(
    command: Command, steps: "tuple[tuple[float, int], ...]", seconds: float, given: int
) -> int:
    """Stop a command whose launcher is lost for `seconds`. `steps`: (seconds, signal); `given`:
    signals so far; returns their new number."""
    if given < len(steps) and seconds >= steps[given][0]:
        command.signal(steps[given][1])
        return given + 1
    return given


def probe() -> int:
    """The Python, whether it has torch, and the files of Duet on this machine."""
    import importlib.util

    facts = {
        "python": platform.python_version(),
        "torch": importlib.util.find_spec("torch") is not None,
        "files": digest(),
    }
    print(json.dumps(facts))
    return 0


def digest() -> str:
    """One checksum of the files of Duet that a launch executes or reads."""
    whole = hashlib.sha256()
    for base in ("lib", "training"):
        for folder, folders, names in os.walk(os.path.join(ROOT, base)):
            folders.sort()
            for name in sorted(n for n in names if n.endswith(SUFFIXES)):
                with open(os.path.join(folder, name), "rb") as file:
                    whole.update(name.encode() + b"\0" + hashlib.sha256(file.read()).digest())
    return whole.hexdigest()


if __name__ == "__main__":
    if sys.argv[1:] == ["probe"]:
        sys.exit(probe())
    sys.exit(run(int(sys.argv[1]) if sys.argv[1:] else 0))
