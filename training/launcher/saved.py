"""The newest checkpoint, after which lost GPUs are tested (training.launcher.rejoin)."""

from __future__ import annotations

import contextlib
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
    that this start of the ranks has written counts, once it has not changed from one look to the
    next: its file exists before it is complete, and other files may follow.

    `rests`: since the last call of `newest`, whether the ranks may be ended: those of a script must
    not be writing their next checkpoint, perhaps over this one.
    """

    def __init__(self, run: rundir.RunDir, plan: Plan) -> None:
        self._run, self._plan = run, plan
        self._since, self._looked = 0.0, 0.0
        self._seen, self._complete = "", ""  # checkpoints of a script
        self.rests = False

    def begin(self) -> str:
        """A start of the ranks; the checkpoint it starts from."""
        self._since, self._looked = time.time(), time.monotonic()
        self._seen, self._complete = "", ""
        return self.newest()

    def newest(self) -> str:
        """Its name; '' without one. Called repeatedly while ranks run."""
        if not is_script(self._plan):
            self.rests = True
            known = manifest.all_in(self._run.checkpoints)
            return known[-1].name if known else ""
        self.rests = False
        if time.monotonic() - self._looked > LOOK_S:
            self._looked = time.monotonic()
            found, _ = script_snapshot.look(self._plan, self._since)
            seen, self._seen = self._seen, _state(found) if found else ""
            self.rests = self._seen == seen
            if self.rests:
                self._complete = seen
        return self._complete


def _state(found: script_snapshot.Snapshot) -> str:
    """Another one for each change."""
    written = [found.written]
    with contextlib.suppress(OSError):  # removed in the meantime
        inside = found.path.iterdir() if found.path.is_dir() else iter([found.path])
        written += [path.stat().st_mtime for path in inside]
    return f"{found.path} {max(written)}"
