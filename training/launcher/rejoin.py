"""Lost GPUs are tested after each checkpoint, each by a child process, and used again if they
work (`--rejoin`)."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.core import exit_status, log, manifest, rundir
from training.core.messages import msg
from training.core.project import ROOT
from training.host import process
from training.host.gpus import VISIBLE, one_line
from training.launcher import fewer_ranks

if TYPE_CHECKING:
    from training.core.contracts.plan import LostRank, Plan

# torch is imported, a context is created; a driver may wait for a dead GPU without end
LIMIT_S = 120.0
KILL_S = 1.0
READ_BYTES = 4096
PROGRAM = (sys.executable, str(ROOT / "lib/run_module.py"), "training.launcher.gpu_trial")


@dataclass
class _Trial:
    lost: LostRank
    popen: subprocess.Popen[bytes]
    until: float  # monotonic


def candidates(plan: Plan) -> list[LostRank]:
    """GPUs that may be used again: not those that were lost a second time. A script has none, since
    its checkpoints are unknown."""
    if "elastic" not in plan or not plan["config"].get("rejoin"):
        return []
    elastic = plan["elastic"]
    return [
        one for one in elastic["lost"] if one["uuid"] and one["seat"] not in elastic["rejoined"]
    ]


class Rejoin:
    """The tests of one launch. They run beside the training and never block the supervisor."""

    def __init__(self, run: rundir.RunDir) -> None:
        self._run = run
        self._trials: list[_Trial] = []
        self._back: list[int] = []
        self._tested = ""  # name of the newest checkpoint at the last test
        self._told: set[str] = set()
        # tests that could not be killed, by planned number: they wait for a dead GPU in the driver
        self._stuck: dict[int, subprocess.Popen[bytes]] = {}

    def begin(self) -> None:
        """A start of the ranks: the next checkpoint is the first to be followed by a test."""
        self.close()
        self._tested = self._newest()

    def look(self, plan: Plan) -> tuple[int, ...]:
        """Planned numbers of the ranks whose GPUs work again, once all tests have ended."""
        lost = [one for one in candidates(plan) if not self._is_stuck(one["seat"])]
        if not lost:
            return ()
        if not self._trials and self._newest() != self._tested:
            self._tested, self._back = self._newest(), []
            self._trials = [_Trial(one, _start(one), time.monotonic() + LIMIT_S) for one in lost]
            return ()
        running = []
        for trial in self._trials:
            status = trial.popen.poll()
            if status is None and time.monotonic() < trial.until:
                running.append(trial)
            elif status == 0:
                self._back.append(trial.lost["seat"])
            else:
                self._tell(trial, status)
            if trial not in running:
                self._end(trial)
        self._trials, back = running, tuple(self._back)
        if running:
            return ()
        self._back = []
        return back

    def _tell(self, trial: _Trial, status: int | None) -> None:
        """Log why a GPU is not used, each reason once."""
        if status is None:
            why = msg("launcher.rejoin.no_answer", limit_s=LIMIT_S)
        else:
            assert trial.popen.stdout
            lines = trial.popen.stdout.read(READ_BYTES).decode("utf-8", "replace").split("\n")
            why = one_line(lines[0]) or exit_status.how(status)
        text = msg("launcher.rejoin.not_yet", name=fewer_ranks.name(trial.lost), why=why)
        if text not in self._told:
            self._told.add(text)
            log.info(text)

    def close(self) -> None:
        """End the tests that still run."""
        for trial in self._trials:
            self._end(trial)
        self._trials = []

    def _end(self, trial: _Trial) -> None:
        popen = trial.popen
        popen.kill()
        try:
            popen.wait(timeout=KILL_S)
        except subprocess.TimeoutExpired:
            self._stuck[trial.lost["seat"]] = popen
        if popen.stdout:
            popen.stdout.close()

    def _is_stuck(self, seat: int) -> bool:
        """Does an earlier test of this GPU still wait for it? Another one would wait, too."""
        if seat in self._stuck and self._stuck[seat].poll() is not None:
            del self._stuck[seat]
        return seat in self._stuck

    def _newest(self) -> str:
        saved = manifest.all_in(self._run.checkpoints)
        return saved[-1].name if saved else ""


def _start(lost: LostRank) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        PROGRAM,
        env={**os.environ, VISIBLE: lost["uuid"]},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # a line, written at its end
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches the supervisor alone
        # The supervisor has one thread, so code between fork and exec is safe.
        preexec_fn=functools.partial(process.die_with_parent, os.getpid()),  # noqa: PLW1509
    )
