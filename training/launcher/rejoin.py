"""Lost GPUs of this machine are tested after each checkpoint, each by a child process, and used
again if they work (`--rejoin`)."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.core import exit_status, log
from training.core.messages import msg
from training.core.plain_text import one_line
from training.core.project import ROOT
from training.host import process
from training.host.gpus import VISIBLE
from training.launcher import fewer_ranks, replan, seats

if TYPE_CHECKING:
    from training.core.contracts.plan import ElasticRecord, LostRank, Plan
    from training.launcher.coordinator import Coordinator

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
    """GPUs of this machine that may be used again: not those that were lost a second time (see
    _lost_again). Another machine that has noted the loss does not know the GPU."""
    if not wanted(plan) or not plan["elastic"]["gpus"]:
        return []
    elastic, here = plan["elastic"], seats.here(plan)
    found: list[LostRank] = []
    for one in elastic["lost"]:
        if one["seat"] in here and not _lost_again(elastic, one):
            gpu = elastic["gpus"][one["seat"] - here.start]
            found.append({**one, "gpu": gpu["index"], "uuid": gpu["uuid"]})
    return [one for one in found if one["uuid"]]


def _lost_again(elastic: ElasticRecord, one: LostRank) -> bool:
    """A defect counts as the second one only after a first defect: the GPU may have come back with
    its machine, which had been restarted."""
    defect = one["cause"] in replan.DEFECTIVE
    return one["seat"] in (elastic.get("defective", ()) if defect else elastic["rejoined"])


def wanted(plan: Plan) -> bool:
    """Whether lost GPUs and machines are used again."""
    return "elastic" in plan and plan["config"]["rejoin"]


def restart_text(label: str, *, script: bool) -> str:
    return (
        msg("launcher.rejoin.restart_script", label=label)
        if script
        else msg("launcher.rejoin.restart", label=label)
    )


def of_machine(plan: Plan, node: int, sent: object) -> set[int]:
    """The planned numbers that another machine has sent, as far as they are its own."""
    named = sent if isinstance(sent, list) else []
    return {seat for seat in seats.on(plan["elastic"], [node]) if seat in named}


def back(plan: Plan, line: Coordinator) -> list[int]:
    """Lost ranks, by planned number, that may be used again: those of machines that have joined
    again, and those whose GPU works on a machine that is connected. Not those whose GPU was
    defective a second time: it would fail again after each return of its machine."""
    elastic, own = plan["elastic"], plan["place"]["node_rank"]
    away = {
        one["seat"]
        for one in elastic["lost"]
        if one["cause"] not in replan.DEFECTIVE or not _lost_again(elastic, one)
    }
    there = [own, *(node for node in line.wires if line.there(node))]
    works = line.works.intersection(seats.on(elastic, there))
    return sorted(away.intersection([*works, *seats.on(elastic, line.ready_again)]))


class Rejoin:
    """The tests of one launch. They run beside the training and never block the supervisor."""

    def __init__(self) -> None:
        self._trials: list[_Trial] = []
        self._back: list[int] = []
        self._works: set[int] = set()  # planned numbers: not tested again in this start
        self._tested = ""  # name of the newest checkpoint at the last test
        self._told: set[str] = set()
        # tests that could not be killed, by planned number: they wait for a dead GPU in the driver
        self._stuck: dict[int, subprocess.Popen[bytes]] = {}

    def begin(self, saved: str) -> None:
        """A start of the ranks from this checkpoint: the next one is the first to be followed by a
        test."""
        self.close()
        self._tested = saved
        self._works.clear()

    def look(self, plan: Plan, saved: str) -> tuple[int, ...]:
        """Planned numbers of the ranks whose GPUs work again, once all tests have ended. `saved`:
        name of the newest checkpoint."""
        lost = [
            one
            for one in candidates(plan)
            if one["seat"] not in self._works and not self._is_stuck(one["seat"])
        ]
        if not lost:
            return ()
        if not self._trials and saved != self._tested:
            self._tested, self._back = saved, []
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
        self._works.update(back)
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


def _start(lost: LostRank) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        PROGRAM,
        env={**os.environ, VISIBLE: lost["uuid"]},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # a line, written at its end
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches the supervisor alone
        # Safe between fork and exec: other threads (Invitations) hold no lock of it.
        preexec_fn=functools.partial(process.die_with_parent, os.getpid()),  # noqa: PLW1509
    )
