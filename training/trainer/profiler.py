"""torch.profiler for some steps of a run (`--profile=N`): a Chrome trace and a digest of each rank
in the run directory. A profile that fails is reported as a warning; training continues."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from training.core import heartbeat, log, rundir, units
from training.core.messages import msg
from training.trainer import profile_digest
from training.trainer.train_state import TrainState

PHASE = "profile"
WARM_UP = 10  # steps before the profile: compilation, allocator, choice of kernels
DISCARDED = 2  # of these, with the profiler on: its own start takes time
# Kineto prints its start and stop to every rank's log. Errors of CUPTI are hidden too, so a trace
# without any work of the GPU is reported here.
LOG_LEVEL, SILENT = "KINETO_LOG_LEVEL", "9"


def planned(session: TrainState) -> StepProfiler | None:
    """The profiler of this rank; None if none is requested or no step is left to profile. All ranks
    profile the same steps: a rank that waits for another one is seen in both traces."""
    steps, first = session.config.profile, session.position.step + 1
    if not steps:
        return None
    left = session.length.total_steps - session.position.step
    if left < 2:
        if session.world.rank == 0:
            _warn(session.run, msg("trainer.profile.too_short", left=units.plural(left, "step")))
        return None
    steps = min(steps, left - 1)
    return StepProfiler(session, first + min(WARM_UP, left - steps), steps)


class StepProfiler:
    """Profiles `steps` steps from step `first` on."""

    def __init__(self, session: TrainState, first: int, steps: int) -> None:
        self._run, self._world = session.run, session.world
        self._first, self._steps, self._step = first, steps, session.position.step
        self._discarded = min(DISCARDED, first - self._step - 1)
        self._profile: profile | None = None
        self._marks = PhaseMarks()
        self._over = False

    def begin(self, step: int) -> bool:
        """Call before each step, with its number. Returns whether the profiler was at work."""
        self._step = step
        if self._over or step < self._first - self._discarded:
            return False
        if self._profile is None:
            self._attempt(self._start)
        elif step <= self._first + self._steps:
            self._attempt(self._next)
        if step >= self._first + self._steps:
            self.close()
        return True

    def close(self) -> None:
        """After the last step. A profile that has begun is written with the steps that it has."""
        if not self._over:
            self._over = True
            if self._step < self._first and self._world.rank == 0:  # by a stop or --max_time
                _warn(self._run, msg("trainer.profile.ended", last=self._step, first=self._first))
            if self._profile is not None:
                self._attempt(self._stop)
            self._profile = None

    def _attempt(self, part: Callable[[], None]) -> None:
        heartbeat.current.beat(PHASE)
        try:
            part()
        # Whatever it raises, which depends on driver and version: the training continues.
        except Exception as error:
            self._over = True
            self._marks.end()
            self._discard()
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            _warn(self._run, msg("trainer.profile.failed", rank=self._world.rank, why=why))

    def _discard(self) -> None:
        """Stop a profiler that has failed: it would record all further steps."""
        failed, self._profile = self._profile, None
        if failed is not None:
            failed.on_trace_ready = None
            with contextlib.suppress(Exception):  # the first error is reported
                failed.stop()

    def _start(self) -> None:
        os.environ.setdefault(LOG_LEVEL, SILENT)
        activities = [ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        found = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=self._discarded, active=self._steps, repeat=1),
            on_trace_ready=self._write,
        )
        self._synchronize()
        self._profile = found
        found.start()
        self._marks.begin()

    def _next(self) -> None:
        """The steps of the trace begin and end with an idle GPU, so no kernel is missing."""
        assert self._profile
        self._marks.close()
        self._synchronize()
        self._profile.step()

    def _stop(self) -> None:
        assert self._profile
        self._marks.end()
        self._synchronize()
        self._profile.stop()

    def _synchronize(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)

    def _write(self, found: profile) -> None:
        self._marks.end()
        rank, device = self._world.rank, self._world.device.type
        self._run.profile.mkdir(exist_ok=True)
        trace = self._run.trace(rank)
        found.export_chrome_trace(str(trace))
        digest = profile_digest.of_trace(trace, rank, device, self._first)
        rundir.write_json(self._run.profile_digest(rank), digest)
        if device == "cuda" and digest["timeline"] != "gpu":
            _warn(self._run, msg("trainer.profile.no_gpu", rank=rank))
        if rank == 0:
            self._remove_further()
            steps = units.steps(self._first, digest["last_step"])
            log.info(msg("trainer.profile.written", steps=steps, folder=self._run.profile))

    def _remove_further(self) -> None:
        """Files of an earlier start with more ranks."""
        rank = self._world.world_size
        while self._run.trace(rank).exists() or self._run.profile_digest(rank).exists():
            self._run.trace(rank).unlink(missing_ok=True)
            self._run.profile_digest(rank).unlink(missing_ok=True)
            rank += 1


class PhaseMarks:
    """The phases of the heartbeat as ranges in the trace, `duet: forward`. Without a profile the
    heartbeat is unchanged, so the marks cost nothing."""

    def __init__(self) -> None:
        self._range: record_function | None = None
        self._thread = threading.get_ident()

    def begin(self) -> None:
        beat = heartbeat.current.beat

        def marked(phase: str) -> None:
            if threading.get_ident() == self._thread:
                self.close()
                self._range = record_function(profile_digest.MARK + phase)
                self._range.__enter__()
            beat(phase)

        vars(heartbeat.current)["beat"] = marked

    def close(self) -> None:
        """The current phase ends."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._range = None

    def end(self) -> None:
        vars(heartbeat.current).pop("beat", None)
        self.close()


def _warn(run: rundir.RunDir, text: str) -> None:
    log.warning(text)
    run.event("warning", code="warning.profile", text=text)
