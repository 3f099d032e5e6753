"""Own time of a rank in a step, before it waits for the others.

It is the time from the end of the previous step to the forward pass (data), plus the time until the
last gradient is ready. On a GPU both are measured with events, which are read without waiting: the
host runs ahead of its GPU, and may wait for it, and so for other ranks, anywhere.
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
    """One step. A part of it has two moments."""

    data: list[tuple[Any, Any]]  # one part, or none: it is unknown
    period: float  # seconds
    segments: list[tuple[Any, Any]]

    def times_s(self) -> tuple[float, float] | None:
        """(own, data) in seconds; None: not complete."""
        if not all(reached(at) for part in self.data + self.segments for at in part):
            return None
        data = sum(elapsed_s(*part) for part in self.data)
        return data + sum(elapsed_s(*part) for part in self.segments), data


def moment(device: torch.device) -> Any:
    """Now: seconds on a CPU, or an event that this GPU reaches when it has done its work so far. It
    may differ from the current GPU, in scripts that select theirs by model.to(rank) alone."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def reached(at: Any) -> bool:
    return isinstance(at, float) or bool(at.query())


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
        self._ended: Any = None  # the step before
        self._data: list[tuple[Any, Any]] = []
        self._begun: Any = None
        self._segments: list[tuple[Any, Any]] = []
        self._pending: deque[Lap] = deque(maxlen=PENDING)
        # own, data, period: milliseconds
        self._laps: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)
        self.count = 0

    def forward(self) -> None:
        self._begun = self._moment()
        if self._begun is not None and self._ended is not None:
            self._data.append((self._ended, self._begun))
            self._ended = None  # only the first one of a step

    def gradients(self) -> None:
        if self._begun is not None:
            self._segments.append((self._begun, moment(self._device)))
            self._begun = None

    def step(self) -> None:
        now = time.perf_counter()
        if self._last is not None and self._segments:  # the start of the first step is unknown
            self._pending.append(Lap(self._data, now - self._last, self._segments))
        self._last, self._ended = now, self._moment()
        self._data, self._begun, self._segments = [], None, []
        while self._pending and (times := self._pending[0].times_s()) is not None:
            own, data = times
            self._laps.append((1000 * own, 1000 * data, 1000 * self._pending.popleft().period))
            self.count += 1

    def _moment(self) -> Any:
        """None: in the capture of a graph, whose events are not reached one by one."""
        captured = self._cuda and torch.cuda.is_current_stream_capturing()
        return None if captured else moment(self._device)

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
