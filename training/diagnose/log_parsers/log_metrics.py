"""Metrics of a training that only logs them: of one log, and of a user script under Duet."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from training.core.jsonl import Record
from training.diagnose.log_parsers import line_parser, metric_names
from training.diagnose.log_parsers.aggregator import LogAggregator
from training.diagnose.log_parsers.log_record import LogRecord
from training.diagnose.log_parsers.log_tail import LogChunk, LogText
from training.diagnose.log_parsers.metric_names import BAR
from training.diagnose.log_parsers.numbered_lines import NumberedLines

if TYPE_CHECKING:
    from training.core.contracts.state import CurveState, ProgressState, TrainingState

NEAR = 5  # segments from the end of the log
ZONE_S = 900.0  # time zones differ by multiples of 15 minutes


class LogMetrics:
    """Metrics of one log; each read parses only new lines."""

    def __init__(self, log: Path, since: int = 0) -> None:
        """`since`: offset of its first line."""
        self.text, self.tally = LogText(log, since), LogAggregator()
        self._numbered = NumberedLines()
        self._looked, self._newest = False, -1
        self._last_step: float | None = None  # when the newest progress line was written

    def read(self, now: float) -> bool:
        """Whether the log has grown; False at the first read."""
        before, looked = self.text.size, self._looked
        fresh, pieces = self.text.read(now)
        if fresh:
            self.tally.clear()
            self._numbered.clear()
            self._last_step, self._newest, before = None, -1, 0
        for piece in pieces:
            self._read_piece(piece)
        self._note_last_step(pieces)
        self._looked = True
        return looked and self.text.there and self.text.size > before

    @property
    def source(self) -> str | None:
        """The framework of its lines; if only a bar is known, from the lines around it."""
        found = self.tally.source
        return (
            found
            if found not in (None, BAR)
            else metric_names.source_around(self.text.start + "\n" + self.text.end) or found
        )

    def training(self) -> TrainingState:
        return {
            **self.tally.training(),
            # an epoch without steps may take hours
            "last_step_unix_s": self._last_step if self.tally.facts else None,
            "loss_scale": None,
            "skipped_steps": None,
        }

    def not_finite(self) -> tuple[float, int | None] | None:
        """The last loss if it is NaN or infinite, and the first step since then, if known."""
        loss, since = self.tally.loss, None
        if loss is None or math.isfinite(loss):
            return None
        for record in reversed(self.tally.records()):
            if "loss" in record:
                if math.isfinite(record["loss"]):
                    break
                since = record["step"]
        return loss, since

    def loss_curve(self, points: int) -> CurveState:
        over, curve = self.tally.curve(points)
        return {"over": over, "points": [{"step": s, "loss": v} for s, v in curve]}

    def records(self) -> list[Record]:
        """Records of steps and evaluations, as in metrics.jsonl; with times if all lines have
        them."""
        out = self.tally.records()
        times = [record.pop("time", None) for record in out if "loss" in record]
        if not times or None in times:
            return out
        # Most lines have no time zone: the one that makes the last line's time match the file's.
        zone_s = ZONE_S * round((times[-1] - self.text.mtime) / ZONE_S)
        logged, at = iter(times), times[0]
        for record in out:  # an evaluation has the time of the step before it
            at = next(logged) if "loss" in record else at
            record["time"] = at - zone_s
        return out

    def progress(self, *, running: bool) -> ProgressState:
        tally, last = self.tally, self.tally.last
        step, total = (last.step, tally.total) if last else (None, tally.total)
        percent = last.percent if last else None
        only_epochs = last is None and tally.epoch_steps is not None
        total = tally.epoch_steps if only_epochs else total
        if percent is None and step is not None and total:
            percent = min(100.0, 100 * step / total)
        return {
            "scope": "epoch"
            if tally.within_epoch or only_epochs
            else "run",  # scope of steps, elapsed time and ETA
            "step": step,
            "total_steps": total,
            "percent": percent,
            "epoch": int(tally.epoch)
            if tally.epoch is not None and float(tally.epoch).is_integer()
            else tally.epoch,
            "epochs": tally.epochs,
            "elapsed_s": tally.elapsed_s(),
            "eta_s": tally.eta_s() if running else None,
        }

    def _read_piece(self, piece: LogChunk) -> None:
        """Adds a chunk; of a brief one only the first progress line and the bar right after it."""
        if piece.gap:
            self.tally.gap()
        found, columns = False, line_parser.columns(self.text.start)
        for offset, raw in piece.segments:
            fact = line_parser.parse(line_parser.of_row(raw, columns) if columns else raw, offset)
            if fact is None:
                continue
            if piece.brief and found and not fact.bar:
                break
            self._add(fact)
            found |= fact.tells
            if piece.brief and found and fact.bar:
                break

    def _add(self, fact: LogRecord) -> None:
        known = self._numbered.read(fact)
        if len(known) > 1:
            self.tally.restart(0)
        for one in known:
            self.tally.add(one)

    def _note_last_step(self, pieces: list[LogChunk]) -> None:
        """Notes when the newest progress line was written: the file's time, if the line is new
        since the last read, or near the end at the first one."""
        newest, last = (
            self.tally.newest_offset,
            [offset for piece in pieces[-1:] for offset, _ in piece.segments][-NEAR:],
        )
        if newest > self._newest and (self._newest >= 0 or (last and newest >= last[0])):
            self._last_step = self.text.mtime
        self._newest = newest


class ScriptFigures:
    """Metrics of a user script, from the output of its ranks: usually rank 0, in some programs the
    last rank, and with torchrun all ranks in one file."""

    def __init__(self, folder: Path, since: Mapping[Path, int] | None = None) -> None:
        """`folder`: the ranks' logs; `since`: log → offset of its first line."""
        self._folder, self._since = folder, since or {}
        self._logs: dict[Path, LogMetrics] = {}

    def read(self) -> LogMetrics | None:
        """The first log with metrics, or else with epochs; None until a rank has printed any."""
        epochs = None
        for path in self._candidates():
            log = self._logs.setdefault(path, LogMetrics(path, self._since.get(path, 0)))
            log.read(time.time())
            if log.tally.facts:
                return log
            epochs = epochs or (log if log.tally.epoch is not None else None)
        return epochs

    def _candidates(self) -> list[Path]:
        try:
            found = {
                int(p.stem[4:]): p for p in self._folder.glob("rank*.log") if p.stem[4:].isdecimal()
            }
        except OSError:
            return []
        ranks = [found[rank] for rank in sorted({min(found), max(found)})] if found else []
        return [*ranks, *self._folder.glob("torchrun.log"), *self._folder.glob("launcher.log")]
