"""One machine: a namespace, the launcher in it, and what can happen to it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.common import ROOT, environment
from benchmarks.elastic.network import Network
from benchmarks.elastic.programs import VARIABLES, Program, Start

KILL_S = 10.0


class Machine:
    """`away`: something has happened to it that is not over."""

    def __init__(self, program: Program, start: Start, network: Network) -> None:
        self._program, self._network = program, network
        self.start, self.number = start, start.number
        self.away = ""
        self.consoles: list[Path] = []
        self.launcher = self._launch()

    def _launch(self) -> subprocess.Popen[bytes]:
        folder = self.start.folder
        self.consoles.append(folder / f"console{self.number}.{len(self.consoles)}.txt")
        space = self._network.names[self.number]
        with self.consoles[-1].open("wb") as out:
            return subprocess.Popen(
                ["ip", "netns", "exec", space, *self._program.command(self.start)],
                cwd=ROOT,
                env=environment(**self._variables()),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def _variables(self) -> dict[str, str]:
        folders = (os.environ.get("PYTHONPATH"), self._program.imports)
        return VARIABLES | {"PYTHONPATH": os.pathsep.join(str(f) for f in folders if f)}

    def again(self) -> None:
        """Start the same command, as a cluster does."""
        self.launcher = self._launch()

    @property
    def status(self) -> int | None:
        return self.launcher.poll()

    def processes(self) -> list[int]:
        return self._network.processes(self.number)

    def lose(self, kind: str) -> float:
        """The time of the loss."""
        self.away = "" if kind in ENDS_AT_ONCE else kind
        return LOSSES[kind](self)

    def back(self) -> None:
        """What has happened is over, but ended launchers are not started again."""
        if self.away == STOPPED:
            self.launcher.send_signal(signal.SIGCONT)
        self._network.join(self.number)
        self.away = ""

    def kill_rank(self) -> float:
        ranks = [pid for pid in self.processes() if _is_rank(pid)]
        if not ranks:
            raise LookupError("no rank runs")
        os.kill(min(ranks), signal.SIGKILL)
        return time.time()

    def kill_launcher(self) -> float:
        self.launcher.kill()
        return time.time()

    def stop_launcher(self) -> float:
        self.launcher.send_signal(signal.SIGSTOP)
        return time.time()

    def power_off(self) -> float:
        """The cable is unplugged before the first process dies: no connection is closed."""
        self._network.unplug(self.number)
        at = time.time()
        self.kill()
        return at

    def cut(self) -> float:
        self._network.unplug(self.number)
        return time.time()

    def mute(self) -> float:
        self._network.mute(self.number)
        return time.time()

    def deafen(self) -> float:
        self._network.deafen(self.number)
        return time.time()

    def part(self) -> float:
        """This machine and the one before it lose each other's packets."""
        self._network.part(self.number, self.number - 1)
        return time.time()

    def kill(self) -> None:
        end = time.monotonic() + KILL_S
        while left := self.processes():
            if time.monotonic() > end:
                raise RuntimeError(f"processes of machine {self.number} do not die: {left}")
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.launcher.poll()
            time.sleep(0.01)
        self.launcher.wait(KILL_S)


def _is_rank(pid: int) -> bool:
    """A process with a rank in its environment, whose parent has none."""
    try:
        process = psutil.Process(pid)
        parent = process.parent()
        return "RANK" in process.environ() and not (parent and "RANK" in parent.environ())
    except psutil.Error:
        return False


RANK, LAUNCHER, STOPPED, POWER = "rank", "launcher", "stopped", "power"
CUT, MUTE, DEAF, PAIR = "cut", "mute", "deaf", "pair"
LOSSES: dict[str, Callable[[Machine], float]] = {
    RANK: Machine.kill_rank,
    LAUNCHER: Machine.kill_launcher,
    STOPPED: Machine.stop_launcher,
    POWER: Machine.power_off,
    CUT: Machine.cut,
    MUTE: Machine.mute,
    DEAF: Machine.deafen,
    PAIR: Machine.part,
}
TITLES = {
    RANK: "a rank is killed",
    LAUNCHER: "the launcher is killed",
    STOPPED: "the launcher is stopped (SIGSTOP) for 15 s",
    POWER: "the machine is switched off",
    CUT: "its cable is unplugged",
    MUTE: "packets from it are lost",
    DEAF: "packets to it are lost",
    PAIR: "two of the others lose each other's packets",
}
ENDS_AT_ONCE = (RANK,)  # nothing to be undone
STOPPED_S = 15.0  # longer than the silence after which a machine counts as lost
