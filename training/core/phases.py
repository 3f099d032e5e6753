"""Phases of Duet's own training: their order, and which of them wait, read or take long."""

from __future__ import annotations

from training.core.heartbeat import FINISHED, STEP_PHASES, HeartbeatRecord, kind

BUILDING = "building the model"  # and the data of a task
STARTING = (
    "importing torch",
    "rendezvous with the other ranks",
    "preparing data",
    "waiting for data",
    BUILDING,
    "first pass",
)
# The first one of a process may compile, which counts as no usual duration.
FIRST_EVALUATION, EVALUATION = "first evaluation", "evaluation"
EVALUATIONS = (FIRST_EVALUATION, EVALUATION)
# Phases between two series of steps, in order; numbers are replaced by '#' (heartbeat.kind).
BETWEEN = (
    *EVALUATIONS,
    "gather state",
    "checkpoint",
    "barrier: epoch #: synchronise",
    "epoch #: creating data iterator",
    "barrier: before iteration",
    "progress bar",
    "profile",
    "barrier: end of training",
    "summary",
    "sample",
    "closing trackers",
    FINISHED,
)
# Phases in which a rank may legitimately wait for the others.
_WAITING = (
    "backward",
    "reduce",
    "optimizer",
    "record",
    *EVALUATIONS,
    "gather state",
    "waiting for data",
    "rendezvous with the other ranks",
)
# Phases after the last step of the run.
AT_END = ("barrier: end of training", "summary", "sample", "closing trackers", FINISHED)
# Phases whose memory does not depend on the micro-batch.
WITHOUT_BATCH = (BUILDING, "gather state", "checkpoint", "sample")
DATA = ("fetch", "creating data iterator")
# Phases longer than a step.
LONG = (
    *EVALUATIONS,
    "checkpoint",
    "gather state",
    "summary",
    "sample",
    "profile",
    "preparing data",
    "creating data iterator",
)
# Phases that write to a disk.
WRITING = ("checkpoint", "summary")
# Phases that read from a disk besides DATA: libraries, checkpoints.
READING = (
    "importing torch",
    BUILDING,
)


def place(beat: HeartbeatRecord) -> tuple[int, int, int]:
    """The position of a rank, comparable between the ranks of a run; the smallest is behind."""
    if beat.phase in STEP_PHASES:
        return beat.step, 0, beat.place
    name = kind(beat.phase)
    if name in STARTING and beat.first_step == 0:
        # The rank that prepares the data and those that wait for it are at the same place.
        return -1, max(0, STARTING.index(name)) - (name == "waiting for data"), 0
    return beat.step, 1, BETWEEN.index(name) if name in BETWEEN else -1


def waits(phase: str) -> bool:
    """Whether a rank in this phase may be waiting for the others."""
    return phase.startswith("barrier: ") or phase in _WAITING


def needs_data(phase: str) -> bool:
    return phase.endswith(DATA)


def off_gpu(phase: str) -> bool:
    """Whether a rank that is stuck in this phase waits for its data loader or a disk, not for its
    GPU."""
    return needs_data(phase) or phase in WRITING


def takes_long(phase: str) -> bool:
    return kind(phase).removeprefix("epoch #: ") in LONG


def reads(phase: str) -> bool:
    """Whether a slow disk may prolong this phase."""
    return needs_data(phase) or phase in READING
