"""The newest checkpoint, after which lost GPUs are tested (training.launcher.rejoin)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from training.core import manifest, rundir
from training.launcher import script_snapshot
from training.launcher.local_ranks import is_script

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

LOOK_S = 30.0  # the folders of a script are searched no more often


class Saved:
    """For one launch. A script may start from its own checkpoint or from nothing: only a checkpoint
    that this start of the ranks has written counts."""

    def __init__(self, run: rundir.RunDir, plan: Plan) -> None:
        self._run, self._plan = run, plan
        self._since, self._looked, self._snapshot = 0.0, 0.0, ""

    def begin(self) -> str:
        """A start of the ranks; the checkpoint it starts from."""
        self._since, self._looked, self._snapshot = time.time(), time.monotonic(), ""
        return self.newest()

    def newest(self) -> str:
        """Its name; '' without one. Called repeatedly while ranks run."""
        if not is_script(self._plan):
            known = manifest.all_in(self._run.checkpoints)
            return known[-1].name if known else ""
        if time.monotonic() - self._looked > LOOK_S:
            self._looked = time.monotonic()
            found, _ = script_snapshot.look(self._plan, self._since)
            self._snapshot = f"{found.path} {found.written}" if found else ""
        return self._snapshot
