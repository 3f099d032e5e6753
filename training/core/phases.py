"""What the phases of our own training mean to one who watches: who waits for whom, who is
behind."""

from __future__ import annotations

from training.core.heartbeat import FINISHED, STEP_PHASES, HeartbeatRecord, kind

STARTING = (
    "importing torch",
    "meeting the other ranks",
    "preparing data",
    "waiting for data",
    "building the model",
    "first pass",
)
# After the last step of a stretch, in this order; 'epoch 3: …' counts without its first two words.
BETWEEN = (
    "evaluation",
    "gather state",
    "checkpoint",
    "barrier: epoch #: synchronise",
    "epoch #: creating data iterator",
    "barrier: before iteration",
    "progress bar",
    "barrier: end of training",
    "sample",
    "closing trackers",
    FINISHED,
)
# Here a rank may wait for the others, and be right.
_WAITING = (
    "backward",
    "reduce",
    "optimizer",
    "record",
    "evaluation",
    "gather state",
    "waiting for data",
    "meeting the other ranks",
)
DATA = ("fetch", "creating data iterator")
# longer than a step
LONG = (
    "evaluation",
    "checkpoint",
    "gather state",
    "sample",
    "preparing data",
    "creating data iterator",
)
# checkpoints and libraries come from a disk too
READING = (
    "importing torch",
    "building the model",
)


def place(beat: HeartbeatRecord) -> tuple[int, int, int]:
    """How far a rank is; the smallest is behind. Comparable between the ranks of a run."""
    if beat.phase in STEP_PHASES:
        return beat.step, 0, beat.place
    name = kind(beat.phase)
    if name in STARTING and beat.first_step == 0:
        # Whoever prepares the data and who waits for it are at the same place.
        return -1, max(0, STARTING.index(name)) - (name == "waiting for data"), 0
    return beat.step, 1, BETWEEN.index(name) if name in BETWEEN else -1


def waits(phase: str) -> bool:
    """May a rank in this phase be waiting for the others?"""
    return phase.startswith("barrier: ") or phase in _WAITING


def needs_data(phase: str) -> bool:
    return phase.endswith(DATA)


def takes_long(phase: str) -> bool:
    return kind(phase).removeprefix("epoch #: ") in LONG


def reads(phase: str) -> bool:
    """May this phase take long because a disk is slow?"""
    return needs_data(phase) or phase in READING
