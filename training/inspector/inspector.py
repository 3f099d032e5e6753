"""DDPInspector, the interface for training loops. It records steps and never waits for other
ranks."""

from __future__ import annotations

import atexit
import hashlib
import math
import os
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import checksum, sample_tracker, step_timer
from .analysis import Judge, due
from .background import Watcher
from .main_thread import in_collective
from .messages import msg
from .pending_step import PendingStep
from .reporting import Finding, FindingsOutput, InspectionError
from .shared_store import open_board

if TYPE_CHECKING:
    from training.inspector.exchange import RankProgress, SeenReport, StartReport, StepRow

__all__ = ["DDPInspector", "InspectionError"]

# Findings that make further training useless or block it; the others cost time or data.
FATAL = {"not_finite", "empty_batch", "parameters_differ", "no_data"}
MODES = ("auto", "warn", "raise")
KEPT = 2  # batches, until their loss is known
CLOSE_S = 10.0
_made = 0  # inspectors in this process; equal on every rank


class DDPInspector:
    """Checks that all ranks train on different samples, with equal weights and at the same speed
    (docs/inspection.md).

        inspector = DDPInspector(model, loader)
        …
            inspector.step(loss, batch)    # at the end of each step, on every rank

    model: wrapped in DistributedDataParallel or not; loader: source of the batches, None: not
    inspected. every: steps between comparisons of the ranks, 0: never. on_finding: 'auto' raises
    InspectionError for a loss that is not finite, an empty batch, differing parameters and a rank
    without data, and warns otherwise; 'warn' never raises; 'raise' always does. slow: a rank is
    slow if its own time exceeds that of the others by this factor. patience_s: how long a step may
    wait for a rank that has run out of data. disjoint: False if all ranks are meant to use the same
    samples. wrapped: whether gradients are averaged; None: detected from the model.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Any = None,
        *,
        every: int = 100,
        on_finding: str = "auto",
        slow: float = 1.3,
        patience_s: float = 60.0,
        disjoint: bool = True,
        wrapped: bool | None = None,
    ) -> None:
        global _made
        if on_finding not in MODES:
            raise ValueError(
                f"on_finding is {on_finding!r}, allowed: {', '.join(map(repr, MODES))}"
            )
        if every < 0 or slow <= 1 or patience_s <= 0:
            raise ValueError(
                f"every is {every} (at least 0), slow is {slow} (above 1), patience_s is "
                f"{patience_s} (above 0)"
            )
        _made += 1
        self._mode, self._every, self._loader = on_finding, every, loader
        self._steps, self._in_step, self._ended, self._broken, self._closed = (
            0,
            False,
            "",
            False,
            False,
        )
        self._noted: deque[PendingStep] = deque()
        self._digests: list[str] = []
        self._seen_told = False
        self._facts: StartReport | None = None  # from the first step on
        self._pid, self._output = os.getpid(), FindingsOutput()
        self._parameters, self._left_out = checksum.comparable(model)
        self._drawn = sample_tracker.watch(loader)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._clock = step_timer.Clock(device)
        self._hooks = step_timer.attach(self._clock, model, self._began)
        self._wrapped = _is_wrapped(model) if wrapped is None else wrapped
        board = open_board(_made)
        self.rank, self.world_size = board.rank, board.world
        self._watcher = Watcher(board, self._output, self._state, self._fatal, patience_s)
        if self.rank == 0:
            self._watcher.judge = Judge(
                board,
                self._output.say,
                self._watcher.find,
                every=every,
                slow=slow,
                patience_s=patience_s,
                disjoint=disjoint,
            )
        atexit.register(self._at_exit)
        self._watcher.start()
        launched = int(os.environ.get("WORLD_SIZE") or 1)
        if self.world_size == 1 and launched > 1:
            text = msg("inspector.alone", rank=os.environ.get("RANK", "?"), launched=launched)
            self._watcher.post(Finding("alone", text))
        elif self.world_size == 1:
            self._output.line(msg("inspector.one_process"))

    def step(self, loss: Any = None, batch: Any = None) -> None:
        """Call at the end of each step. loss: a tensor (mean of this rank, or one value per sample)
        or a number; batch: the batch of this step. Raises InspectionError for a finding on this
        rank or, shortly after, on another one."""
        if self._closed:
            return
        self._steps += 1
        self._in_step = False
        self._clock.step()
        size = sample_tracker.size(batch)
        place = self._drawn.took(size) if self._drawn is not None else None
        if batch is None and place and place[2]:
            size = len(place[2])
        self._note(loss, size, place, batch)
        if self._steps == 1:
            self._tell_start()
        if not self._seen_told:
            self._collect(batch, size)
        self._ended = ""
        self._settle(wait=False)
        if self._watcher.raised:
            self._raise(self._watcher.raised)

    def begun(self, epoch: int) -> None:
        """For callbacks: this epoch (from 1) of the loader began before the inspector was
        created."""
        if self._drawn is not None and not self._drawn.epoch:
            self._drawn.begun(epoch)

    def fetches(self, batches: int) -> None:
        """For callbacks: so many batches are fetched together, before the first of their steps."""
        if self._drawn is not None:
            self._drawn.ahead += batches

    def epoch_end(self) -> None:
        """This rank has no more batches in this epoch. Only needed for loaders without a detectable
        end (an IterableDataset)."""
        if not self._closed:
            self._ended, self._in_step = msg("inspector.ended.epoch"), False
            self._tell_seen()

    def close(self) -> None:
        """End the inspection after the loop; may raise InspectionError. Otherwise the end of the
        process does it."""
        self._close(msg("inspector.ended.loop"), limit_s=CLOSE_S)
        if self._watcher.raised:
            self._raise(self._watcher.raised)

    def __enter__(self) -> DDPInspector:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:  # the exception has priority
            self._close("", limit_s=1.0)

    # Called by the watcher

    def _state(self) -> RankProgress:
        drawn = self._drawn
        exhausted = drawn is not None and drawn.exhausted and not self._in_step
        ended = self._ended or (msg("inspector.ended.loader") if exhausted else "")
        return {
            "step": self._steps,
            "in_step": self._in_step,
            "ended": ended,
            "broken": self._broken,
            "epoch": 0 if drawn is None else drawn.trained if ended else drawn.epoch,
            "waits": bool(ended) and (self._closed or in_collective()),
            "laps": self._clock.count // step_timer.WINDOW * step_timer.WINDOW,
            "times": self._clock.medians(),
        }

    def _fatal(self, found: Finding) -> bool:
        return self._mode == "raise" or (self._mode == "auto" and found.kind in FATAL)

    # The step

    def _began(self) -> None:
        self._in_step, self._ended = True, ""

    def _note(
        self, loss: Any, size: int | None, place: tuple[int, int, list[int]] | None, batch: Any
    ) -> None:
        checked = due(self._steps, self._every) and self._parameters
        parameters = (p for _, p in self._parameters) if checked else None
        self._noted.append(PendingStep.taken(self._steps, size, loss, place, batch, parameters))
        if len(self._noted) > KEPT:  # the GPU is behind: do not keep its batches alive
            old = self._noted[-1 - KEPT]
            old.batch = old.losses = None

    def _settle(self, *, wait: bool) -> None:
        """Check the steps whose loss has arrived."""
        while self._noted and (wait or self._noted[0].has_arrived()):
            noted = self._noted.popleft()
            loss = noted.value()
            if due(noted.step, self._every):
                self._tell_row(noted, loss)
            if noted.size == 0:
                self._find(
                    Finding(
                        "empty_batch",
                        msg("inspector.empty_batch", rank=self.rank, step=noted.step),
                        self.rank,
                        noted.step,
                    )
                )
            elif loss is not None and not math.isfinite(loss):
                which = noted.samples()
                text = msg("inspector.not_finite.text", loss=loss, rank=self.rank, step=noted.step)
                text = (
                    msg("inspector.not_finite.with_samples", text=text, samples=which)
                    if which
                    else text
                )
                self._find(Finding("not_finite", text, self.rank, noted.step))

    def _find(self, found: Finding) -> None:
        self._watcher.post(found)
        if self._fatal(found):
            self._raise(found)

    def _raise(self, found: Finding) -> None:
        self._close("", limit_s=1.0)
        raise InspectionError(found)

    # Reports

    def _tell_start(self) -> None:
        names = [name for name, _ in self._parameters]
        shapes = repr([(name, tuple(p.shape), str(p.dtype)) for name, p in self._parameters])
        facts: StartReport = {
            **sample_tracker.describe(self._loader, self._drawn),
            "first": self._first(),
            "structure": hashlib.blake2b(shapes.encode(), digest_size=8).hexdigest(),
            "compared": len(names),
            "left_out": self._left_out,
            "names": names if self.rank == 0 else [],
            "wrapped": self._wrapped,
        }
        self._facts = facts
        self._watcher.put(f"start/{self.rank}", facts)

    def _first(self) -> list[list[int]]:
        """Indices of the first batches; [] if unknown."""
        return list(self._drawn.first) if self._drawn is not None and any(self._drawn.first) else []

    def _collect(self, batch: Any, size: int | None) -> None:
        """Collect digests of the first samples, without the last batch of an epoch, which may be
        padded with the first samples."""
        batches = self._facts["batches"] if self._facts else None
        last = batches is not None and self._steps >= batches
        fresh = (
            sample_tracker.digests(batch, size)
            if batch is not None and size and not (last and batches)
            else []
        )
        again = set(fresh) & set(self._digests)
        if not again:
            self._digests += fresh
        if self._steps >= sample_tracker.PROVEN_STEPS or last or again:
            self._tell_seen()

    def _tell_seen(self) -> None:
        if self._seen_told or self._facts is None:
            return
        self._seen_told = True
        first, batches = self._first(), self._facts["batches"]
        if first and batches is not None and len(first) >= batches:
            first = first[: batches - 1]
        indices = [i for one in first for i in one] if first else None
        seen: SeenReport = {"indices": indices, "digests": self._digests}
        self._watcher.put(f"seen/{self.rank}", seen)

    def _tell_row(self, noted: PendingStep, loss: float | None) -> None:
        sums = (
            [f"{number:012x}" for number in noted.sums.tolist()] if noted.sums is not None else []
        )
        total = f"{sum(int(s, 16) for s in sums) % (1 << checksum.BITS):012x}" if sums else None
        if sums:
            self._watcher.put(f"sums/{noted.step}/{self.rank}", sums)
        row: StepRow = {
            "step": noted.step,
            "size": noted.size,
            "loss": None if loss is None else repr(loss),
            "sum": total,
        }
        self._watcher.put(f"row/{noted.step}/{self.rank}", row)

    # The end

    def _close(self, ended: str, limit_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        # Within a step: an exception, possibly because another rank has ended.
        self._broken = self._in_step
        self._ended = self._ended if self._broken else self._ended or ended
        for hook in self._hooks:
            hook.remove()
        self._tell_seen()
        if self._drawn is not None:
            sample_tracker.unwatch(self._loader, self._drawn)
        self._watcher.close(limit_s)
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        self._close(msg("inspector.ended.script"), limit_s=CLOSE_S)
        if self._broken and self._watcher.no_data and self._fatal(self._watcher.no_data):
            # The exception of this rank is a consequence of that finding.
            self._output.keep(InspectionError(self._watcher.no_data))


def _is_wrapped(model: nn.Module) -> bool:
    """Whether a known wrapper averages the gradients of the ranks."""
    known = ("DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")
    inner = getattr(model, "_orig_mod", model)  # torch.compile
    return any(type(m).__name__ in known for m in (inner, *inner.modules())) or any(
        hasattr(p, "placements") for p in inner.parameters()
    )
