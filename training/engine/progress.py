"""What rank 0 shows while training: a progress bar on a terminal, `[time] Epoch: 1, Iter: 100, Loss: 0.0234` lines."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from tqdm import tqdm

from training import console
from training.engine.checkpoint import Position
from training.engine.evaluate import Score
from training.engine.record import Recorder
from training.engine.session import Session


class Stopwatch:
    """Time of a step, evaluation and checkpoint left out."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._last = time.perf_counter()

    def restart(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> tuple[float, float]:
        """(milliseconds of the step, tokens per second of all ranks)."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds * 1000, self.tokens / seconds


class Progress:
    """One epoch's display. Silent on other ranks than 0; the bar is silent where there is no terminal."""

    def __init__(self, session: Session, recorder: Recorder | None, position: Position) -> None:
        self.session, self.recorder = session, recorder
        self._bar: tqdm[Any] | None = None
        self._start = position.used // session.batches.step_sequences
        self._end = self._start + min(session.steps_left(position), session.length.total_steps - position.step)

    def __enter__(self) -> Progress:
        if self.recorder:
            # disable=None: nothing is written when standard error is no terminal.
            self._bar = tqdm(
                total=self._end, initial=self._start, disable=None, file=sys.stderr, unit="step", leave=False, dynamic_ncols=True
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self, position: Position, loss: float, rate: float, norm: float, lap: tuple[float, float]) -> None:
        if not self.recorder:
            return
        milliseconds, speed = lap
        record = {"step": position.step, "epoch": position.epoch + 1, "loss": loss, "lr": rate, "grad_norm": norm}
        self.recorder.write({**record, "tokens": position.tokens, "tokens_per_s": speed, "step_ms": milliseconds})
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            self._bar.update()
        if position.step == 1 or position.step % self.session.config.log_every == 0 or position.step == self.session.length.total_steps:
            self._line(position, f"Loss: {loss:.4f}, LR: {rate:.2e}, {speed:.0f} tokens/s")

    def evaluation(self, position: Position, result: tuple[Score | None, float]) -> None:
        score, seconds = result
        if not self.recorder or score is None:
            return
        record = {"step": position.step, "epoch": position.epoch + 1, "val_loss": score.loss, "val_bpb": score.bpb}
        self.recorder.write({**record, "eval_ms": seconds * 1000})
        self.session.run.event("eval", step=position.step, val_bpb=score.bpb)
        self._line(position, f"Validation: {score.bpb:.4f} bits per byte")

    def _line(self, position: Position, text: str) -> None:
        line = f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] Epoch: {position.epoch + 1}, Iter: {position.step}, {text}"
        tqdm.write(line, file=sys.stderr)
        console.to_log(f"{line}\n")  # where no supervisor does it with all that the ranks say
