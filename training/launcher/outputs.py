"""Output of the ranks of this machine during one attempt: to their logs, that of the first rank
also to the console."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable

from training.core import log, rundir
from training.core.messages import msg
from training.host.gpus import one_line
from training.launcher.output import RankOutput
from training.launcher.spawn import Child

GATHER_S = 0.002


class Outputs:
    """`heard` is called when a rank has printed something."""

    def __init__(
        self, run: rundir.RunDir, selector: selectors.BaseSelector, heard: Callable[[], None]
    ) -> None:
        self._run, self._selector, self._heard = run, selector, heard
        self._open: dict[int, RankOutput] = {}  # by descriptor
        self._trickles = False  # output comes in small pieces

    def add(self, child: Child, *, shown: bool) -> RankOutput:
        path = (
            self._run.ranks / "torchrun.log"
            if child.rank is None
            else self._run.rank_log(child.rank)
        )
        output = self._open[child.output] = RankOutput(child.output, path, shown=shown)
        self._selector.register(child.output, selectors.EVENT_READ, self._on_output)
        return output

    def gather(self) -> None:
        """Wait briefly where output comes in small pieces: one system call a line would take CPU
        time from the ranks."""
        if self._trickles:
            self._trickles = False
            time.sleep(GATHER_S)

    def _on_output(self, fd: int) -> None:
        self._heard()
        more = self._open[fd].drain()
        self._trickles |= self._open[fd].trickles
        if not more:
            self.show_threads(ended=True)
            self._selector.unregister(fd)
            self._open.pop(fd).close()

    def show_threads(self, ended: bool = False) -> None:
        """Warn of exceptions in threads: they end neither the rank nor the run, and are otherwise
        in that rank's log alone."""
        for output in self._open.values():
            if text := output.thread(ended):
                text = msg(
                    "launcher.thread_exception",
                    rank=output.path.stem,
                    exception=one_line(text)[:300],
                    path=output.path,
                )
                log.warning(text)
                self._run.event(
                    "warning",
                    code="warning.thread_exception",
                    text=text,
                    rank=int(output.path.stem.removeprefix("rank")),
                    by="supervisor",
                )

    def drain_rest(self) -> None:
        """The remaining output of ended children; a grandchild that keeps the pipe open cannot
        block this."""
        for fd, output in self._open.items():
            os.set_blocking(fd, False)
            while output.drain():
                pass
        self.show_threads(ended=True)
        for output in self._open.values():
            output.close()
        self._open.clear()
