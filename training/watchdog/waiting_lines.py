"""Is the latest output of the ranks only a report that one still waits? torch prints one every ten
seconds while a rank waits in its store, vLLM one a minute beside workers that do not answer; no
rank has made progress by that."""

from __future__ import annotations

import re
from pathlib import Path

from training.core.tail import log_sizes

MOST = 1 << 16  # bytes: such a report is shorter
_WAITS = re.compile(
    rb"\[c10d\] (waitForInput|The client socket)\b"
    rb"|No available (shared memory broadcast )?block found in "
)


class WaitingLines:
    """`folder`: the logs of the ranks. `remember()` is called while they are silent, `only()` after
    the next output."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[Path, int] | None = None

    @property
    def remembers(self) -> bool:
        return self._sizes is not None

    def remember(self) -> None:
        if self._sizes is None:
            self._sizes = log_sizes(self._folder)

    def only(self) -> bool:
        """Is that all what was printed since? Otherwise the silence has ended: call `remember()`
        again in the next one."""
        before, now = self._sizes or {}, log_sizes(self._folder)
        self._sizes = None
        added = {file: size - before.get(file, 0) for file, size in now.items()}
        if not 0 < sum(added.values()) <= MOST:
            return False
        try:
            for file, count in added.items():
                with file.open("rb") as log:
                    log.seek(before.get(file, 0))
                    if not all(map(_WAITS.search, log.read(max(0, count)).splitlines())):
                        return False
        except OSError:  # removed by the rotation of logs
            return False
        self._sizes = now
        return True
