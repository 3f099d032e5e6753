"""gpu.json: the figures of all stages and what they belong to; gpu.html is drawn from it.

The benchmark remembers nothing else: with a copy of gpu.json it continues on another machine of the
same kind.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu import page
from benchmarks.gpu.stages import STAGES, Record, Session, Stage
from training.core.rundir import read_json, write_bytes, write_json

FORMAT = 1


class Results:
    """Records of the stages in the session's folder."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.json, self.html = session.folder / "gpu.json", session.folder / "gpu.html"

    def before(self, stage: Stage) -> Record | None:
        """The record of a stage, if it belongs to this machine and commit. One with nanochat is
        kept by a call that does not ask for it."""
        record: Record | None = ((read_json(self.json) or {}).get("stages") or {}).get(stage.name)
        wanted = self.session.key(stage)
        return record if record and record["key"] | wanted == record["key"] else None

    def keep(self, stage: Stage, record: Record | None) -> dict[str, Any]:
        """Write both files with this record of the stage; None: it is being measured."""
        records = {name: self.before(one) for name, one in STAGES.items()} | {stage.name: record}
        machine = self.session.machine
        result = {
            "format": FORMAT,
            "created": time.time(),
            "name": machine.title,
            "machine": machine.record(),
            "commit": self.session.commit,
            "smoke": self.session.smoke,
            "stages": {name: records[name] for name in STAGES if records.get(name)},
        }
        self.session.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.json, result)
        write_bytes(self.html, page.html(result).encode())
        return result
