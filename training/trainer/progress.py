"""Progress display of rank 0: a progress bar on a terminal, `[time] Epoch: 1, Iter: 100, Loss:
0.0234` lines."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType
from typing import Any

import torch
from tqdm import tqdm

from training.core import log, metric_units, units
from training.inspector.step_timer import elapsed_s, moment
from training.trainer.checkpoint import TrainProgress
from training.trainer.evaluate import Scores
from training.trainer.metrics_writer import MetricsWriter
from training.trainer.step_stats import StepReport
from training.trainer.time_limit import USED
from training.trainer.train_state import TrainState


class Stopwatch:
    """Time of a step, without evaluation and checkpoint. On a GPU it is that of the GPU: the host
    may read the figures of two steps at once."""

    def __init__(self, units: int, device: torch.device) -> None:
        self.units, self._device = units, device
        self._last = self.now()

    def now(self) -> Any:
        return moment(self._device)

    def restart(self, since: Any) -> None:
        """The next step began at `since`, of now()."""
        self._last = since

    def lap(self, end: Any) -> tuple[float, float]:
        """(milliseconds of the step, units per second of all ranks); `end`: the moment at which the
        step ended, which has been reached."""
        took_s, self._last = elapsed_s(self._last, end), end
        return took_s * 1000, self.units / took_s


def _speed_at_peak(session: TrainState) -> float | None:
    """Units per second if all ranks' GPUs only did the model's arithmetic; None: unknown."""
    cost = session.task.flops(session.raw) if session.peak else None
    return session.peak / cost if session.peak and cost else None


class Progress:
    """Display of one epoch. Nothing on ranks other than 0; no bar without a terminal."""

    def __init__(
        self, session: TrainState, recorder: MetricsWriter | None, position: TrainProgress
    ) -> None:
        self.session, self.recorder, self._speed_at_peak = (
            session,
            recorder,
            _speed_at_peak(session),
        )
        self._bar: tqdm[Any] | None = None
        self._start = position.used // session.batches.step_sequences
        self._end = self._start + session.steps_to_train(position)

    def __enter__(self) -> Progress:
        if self.recorder:
            # disable=None: no bar unless standard error is a terminal.
            self._bar = tqdm(
                total=self._end,
                initial=self._start,
                disable=None,
                file=sys.stderr,
                unit="step",
                leave=False,
                dynamic_ncols=True,
            )
            log.below_bar(not self._bar.disable)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
            log.below_bar(False)

    def step(
        self,
        position: TrainProgress,
        report: StepReport,
        rate: float,
        lap: tuple[float, float],
    ) -> None:
        if not self.recorder:
            return
        (milliseconds, speed), loss = lap, report.loss if math.isfinite(report.loss) else None
        record = {
            "step": position.step,
            "epoch": position.epoch + 1,
            "loss": loss,
            "lr": rate,
            "grad_norm": None if report.skipped else report.norm,
        }
        if scale := self.session.loss_scale:
            record |= {"loss_scale": report.scale, "skipped_steps": scale.skipped}
        if self.session.time_limit:
            record[USED] = round(report.used_s, 3)
        unit = self.session.task.unit
        use = {unit: position.tokens, f"{unit}_per_s": speed, "step_ms": milliseconds}
        ranks = {
            "compute_ms": [
                None if share.compute_ms is None else round(share.compute_ms, 3)
                for share in report.shares
            ],
            "memory_bytes": [share.memory for share in report.shares],
        }
        power = self.recorder.power
        watts = power.watts(milliseconds / 1000) if power else None
        if watts is not None:
            use |= {"power_w": watts, "joules_per_unit": watts / speed}
        self.recorder.write(
            {**record, **use, "mfu": self._speed_at_peak and speed / self._speed_at_peak, **ranks}
        )
        if self.recorder.forecast:
            self.recorder.forecast.step(position.step, milliseconds, report.used_s)
        if self._bar is not None:
            if loss is not None:
                self._bar.set_postfix(loss=self.session.task.shown_loss(loss), refresh=False)
            self._bar.update()
        if (
            position.step == 1
            or position.step % self.session.config.log_every == 0
            or position.step == self.session.length.total_steps
        ):
            shown = "-" if loss is None else self.session.task.shown_loss(loss)
            self._line(
                position,
                f"Loss: {shown}, LR: {rate:.2e}, {units.amount(speed).replace(',', '')} {unit}/s",
            )

    def evaluation(self, position: TrainProgress, result: tuple[Scores | None, float]) -> None:
        scores, seconds = result
        if not self.recorder or scores is None:
            return
        found = {f"val_{name}": value for name, value in scores.items()}
        record = {"step": position.step, "epoch": position.epoch + 1, **found}
        kind = metric_units.AVERAGED if self.session.average else {}
        self.recorder.write({**record, "eval_ms": seconds * 1000, **kind})
        self.session.run.event("eval", step=position.step, **found)
        self._line(position, f"Validation: {self.session.task.shown(scores)}")

    def checkpoint(self) -> None:
        """Before a checkpoint is saved."""
        if self.recorder:
            self.recorder.checkpoint()

    def _line(self, position: TrainProgress, text: str) -> None:
        line = (
            f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] Epoch: {position.epoch + 1}, Iter: "
            f"{position.step}, {text}"
        )
        tqdm.write(line, file=sys.stderr)
        log.to_log(f"{line}\n")  # only without a supervisor, which logs the ranks' output
