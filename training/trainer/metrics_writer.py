"""Records of rank 0: metrics.jsonl at once, trackers in the background."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import tasks
from training.config.schema import Config
from training.core import json_text, log, run_reader, rundir
from training.core.messages import msg
from training.core.redact import masked
from training.host import packages
from training.host.wandb_login import wandb_mode
from training.trainer import tracker_threads, tracking
from training.trainer.power import PowerMeter
from training.trainer.tracker_threads import Trackers
from training.trainer.tracking import End, Tracker

if TYPE_CHECKING:
    from training.core.contracts.metrics import Figures
    from training.core.contracts.plan import Plan
    from training.core.contracts.run_files import SummaryRecord
    from training.trainer.forecast import Forecast

AFTER_A_START = ("failure", "restart")  # events passed to trackers at the next start

_current: MetricsWriter | None = None
_unclean = False  # a tracker failed or was abandoned


def login(plan: Plan) -> str | None:
    """The W&B key in the run's option file; the one in the environment takes precedence."""
    file = plan.get("login_file")
    return tasks.login_key(Path(file)) if file and not os.environ.get("WANDB_API_KEY") else None


class MetricsWriter:
    """Rank 0's writer of steps and evaluations; `write()` returns at once."""

    def __init__(
        self,
        run: rundir.RunDir,
        config: Config,
        values: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> None:
        """`values`: configuration for trackers, if not the complete one; `key`: for W&B."""
        global _current
        self._file = os.open(run.metrics, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self._path, self._disk_warned = run.metrics, False
        self._unwritten = b"\n" if rundir.torn(self._file) else b""
        self._notes = _since_the_last_start(run)
        makers: dict[str, Callable[[int], Tracker]] = {}
        lacks = packages.lacking(("tensorboard", "wandb"))  # the plan has a note on each
        if config.tensorboard and "tensorboard" not in lacks:
            makers["TensorBoard"] = lambda first: tracking.TensorBoard(run, first)
        mode, reason = wandb_mode(config, key)
        if mode != "disabled" and "wandb" in lacks:
            mode, reason = "disabled", msg("trainer.metrics.no_wandb")
        shown = vars(config) if values is None else values
        if mode != "disabled":
            earlier = os.fstat(self._file).st_size
            makers["W&B"] = lambda first: tracking.WandB(
                run, config, mode, shown, key, first, earlier
            )
        self.wandb = f"{mode} ({reason})"
        self.power: PowerMeter | None = None  # of the GPUs; None: unknown
        self.forecast: Forecast | None = None
        later = {"W&B": f"wandb sync --include-online {shlex.quote(str(run.wandb / 'latest-run'))}"}
        self._trackers = Trackers(makers, partial(_stuck, run), later)
        _current = self

    def write(self, figures: Figures) -> None:
        record: Figures = {"time": time.time(), **figures}
        self._unwritten += (json_text.dumps(record) + "\n").encode()
        self.flush()
        self._trackers.write(record)
        while self._notes:
            self._trackers.note(self._notes.pop(0), record["step"])

    def flush(self) -> None:
        """Write the pending records. If the disk is full they stay in memory for the next attempt:
        training continues, and nothing is lost once there is space."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
        except OSError as error:
            if not self._disk_warned:
                log.warning(
                    msg("trainer.metrics.unwritten", path=self._path, strerror=error.strerror)
                )
            self._disk_warned = True

    def checkpoint(self) -> None:
        """A checkpoint is being saved: trackers keep what led to it, also if this process is
        killed. Returns at once."""
        self._trackers.flush()

    def close(self, summary: SummaryRecord, code: int) -> None:
        """Write everything, report the end to the trackers, and close or abandon them."""
        self._close(End(code, dict(summary)), tracker_threads.CLOSE_S, tracker_threads.STARTING_S)

    def _close(self, end: End, limit_s: float, starting_s: float = 0.0) -> None:
        global _current, _unclean
        _current = None
        self.flush()
        if self.power:
            self.power.close()
        os.close(self._file)
        _unclean = not self._trackers.close(end, limit_s, starting_s)


def _stuck(run: rundir.RunDir, text: str) -> None:
    log.warning(text)
    run.event("warning", code="warning.tracker_stuck", text=text)


def _since_the_last_start(run: rundir.RunDir) -> list[str]:
    """Events of the run between the previous start and this one."""
    found: list[str] = []
    for event in run_reader.read_events(run.events):
        if event.get("event") == "start":
            found = []
        elif event.get("event") in AFTER_A_START:
            found.append(masked(f"{event['event']}: {event.get('text')}"))
    return found


def exits_cleanly() -> bool:
    """False if exit handlers of a tracker that failed or was abandoned may block or raise."""
    return not _unclean


def failed(status: int) -> None:
    """Report a failure of this rank to its trackers, with a short time limit."""
    if _current:
        _current._close(End(status), tracker_threads.FAILED_S)
