"""Asks node 0 for the run that it resumes, before this machine makes its plan."""

from __future__ import annotations

from pathlib import Path

from training.config.schema import Config
from training.core import find_run, run_reader
from training.core.errors import Exit, Problem, UserError
from training.core.find_run import LATEST
from training.core.messages import msg
from training.core.rundir import RunDir
from training.host import hosts, process
from training.host.placement import NODE, Topology
from training.launcher import continued_run, rendezvous
from training.plan import sent_run

# Where this machine sees a finished run: node 0 does not start either if the disk is shared.
DONE_S = 30.0


class NotInstalled(Exception):
    """Node 0 is asked once the packages are installed."""


class Received:
    """Called with role and configuration, possibly more than once: returns the run as node 0 has
    sent it, or None for a rank, on the first machine, on a single one, and where node 0 begins a
    new run. Raises UserError when node 0 does not answer, and NotInstalled."""

    def __init__(self, *, installed: bool = True) -> None:
        self._installed = installed
        self._asked = False
        self._run: RunDir | None = None

    def __call__(self, place: Topology, config: Config, experiments: Path) -> RunDir | None:
        if not self._asked:
            self._asked = True
            self._run = self._ask(place, config, experiments)
        return self._run

    def _ask(self, place: Topology, config: Config, experiments: Path) -> RunDir | None:
        if place.kind != NODE or place.leads or place.source == hosts.HEAD:
            return None
        if not self._installed:
            raise NotInstalled
        place = continued_run.of_place(place, experiments, config.resume) or place
        done = _is_done(config.resume, experiments)
        limit_s = min(config.rendezvous_timeout, DONE_S) if done else config.rendezvous_timeout
        try:
            with process.stoppable():
                sent = rendezvous.ask_resumed(place, limit_s)
        except UserError as error:
            if done and error.problems[0].code == "nodes.no_answer":
                return None
            raise
        try:
            return sent_run.keep(sent, experiments, place.node_rank)
        except OSError as error:
            text = msg("core.rundir.unwritable", file=experiments, strerror=error.strerror)
            fixes = ["--out_dir=/another/folder"]
            raise UserError(
                Problem("output.unwritable", text, "", fixes, "out_dir"), Exit.RESOURCES
            ) from error

    def withdraw(self) -> None:
        """Remove what was written, when the plan is refused."""
        if self._run:
            sent_run.remove(self._run)


def _is_done(wanted: str, experiments: Path) -> bool:
    """Whether the run has ended by itself, as far as this machine sees it."""
    found = find_run.newest(experiments) if wanted == LATEST else None
    runs = [found] if found else [RunDir(path) for path in (Path(wanted), experiments / wanted)]
    ends = (run_reader.read_summary(run.summary) for run in runs)
    return any(end is not None and end.get("status") == "done" for end in ends)
