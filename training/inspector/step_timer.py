"""Own time of a rank in a step, before it waits for the others.

It is the time from the end of the previous step to the forward pass (data), plus the time until the
last gradient is ready. On a GPU the second part is measured with events, which are read without
waiting.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

WINDOW = 50  # steps
LEAST = 20  # steps required for a median
PENDING = 64  # maximum number of steps that a GPU may be behind


@dataclass(frozen=True)
class Lap:
    """One step on a GPU. Times in seconds; a segment is a pair of its events."""

    data: float
    period: float
    segments: list[Any]

    def own_s(self) -> float | None:
        """Own time in seconds; None: not complete."""
        if not all(end.query() for _, end in self.segments):
            return None
        return self.data + sum(elapsed_s(begin, end) for begin, end in self.segments)


def moment(device: torch.device) -> Any:
    """Now: seconds on a CPU, or an event that this GPU reaches when it has done its work so far. It
    may differ from the current GPU, in scripts that select theirs by model.to(rank) alone."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def elapsed_s(begin: Any, end: Any) -> float:
    """Seconds between two moments; events must have been reached."""
    if isinstance(begin, float):
        return float(end - begin)
    return float(begin.elapsed_time(end)) / 1000


class Clock:
    """Call `forward()`, `gradients()` and `step()` at these events; `medians()` from any thread."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._last: float | None = None
        self._data = 0.0
        self._begun: Any = None
        self._segments: list[Any] = []
        self._pending: deque[Lap] = deque(maxlen=PENDING)
        # own, data, period: milliseconds
        self._laps: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)
        self.count = 0

    def forward(self) -> None:
        if self._begun is None and not self._segments and self._last is not None:
            self._data = time.perf_counter() - self._last
        # The events of a captured graph are not reached one by one.
        captured = self._cuda and torch.cuda.is_current_stream_capturing()
        self._begun = None if captured else moment(self._device)

    def gradients(self) -> None:
        if self._begun is not None:
            now = moment(self._device)
            self._segments.append((self._begun, now) if self._cuda else elapsed_s(self._begun, now))
            self._begun = None

    def step(self) -> None:
        now = time.perf_counter()
        if self._last is not None and self._segments:  # the start of the first step is unknown
            if self._cuda:
                self._pending.append(Lap(self._data, now - self._last, self._segments))
            else:
                self._keep(self._data + sum(self._segments), self._data, now - self._last)
        self._last, self._begun, self._segments = now, None, []
        while self._pending and (own := self._pending[0].own_s()) is not None:
            lap = self._pending.popleft()
            self._keep(own, lap.data, lap.period)

    def _keep(self, own: float, data: float, period: float) -> None:
        self._laps.append((1000 * own, 1000 * data, 1000 * period))
        self.count += 1

    def medians(self) -> tuple[float, float, float] | None:
        """(own, data, period) in milliseconds over the last steps; None: too few steps, or the
        forward pass is not observed."""
        laps = list(self._laps)
        if len(laps) < LEAST:
            return None
        own, data, period = (median(column) for column in zip(*laps, strict=True))
        return own, data, period


class Hook:
    """A module hook that becomes a no-op without dependencies when the module is pickled or
    copied."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce__(self) -> Any:
        # takes any arguments and returns None
        return getattr, (
            contextlib.nullcontext(),
            "__exit__",
        )


def attach(clock: Clock, model: nn.Module, began: Any) -> list[Any]:
    """Hooks that call the clock, and `began()` at the forward pass of a training step; each has
    remove()."""

    def forward(module: nn.Module, args: object) -> None:
        if module.training and torch.is_grad_enabled():
            clock.forward()
            began()

    hooks = [model.register_forward_pre_hook(Hook(forward))]
    # The first parameter usually gets its gradient last.
    first = next((p for p in model.parameters() if p.requires_grad), None)
    if first is not None and first.is_leaf and hasattr(first, "register_post_accumulate_grad_hook"):
        hooks.append(first.register_post_accumulate_grad_hook(lambda parameter: clock.gradients()))
    return hooks
