"""What ranks tell each other through the store (shared_store), as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class LoaderFacts(TypedDict):
    """What is known of a rank's data before it trains."""

    dataset: int | None  # samples; None: not known
    batches: int | None  # per epoch
    sampler: str  # '' without a loader
    whole_dataset: bool  # each rank draws from all of it
    fingerprint: str  # of some samples; ''


class StartReport(LoaderFacts):
    """start/RANK."""

    first: list[list[int]]  # indices of the first batches; [] where they are not known
    structure: str  # digest of the parameters' names, shapes and types
    compared: int  # parameters
    left_out: str  # why some are not compared; ''
    names: list[str]  # of the parameters, by rank 0
    wrapped: bool  # by DDP


class SeenReport(TypedDict):
    """seen/RANK: the samples of the first batches."""

    digests: list[str]
    indices: list[int] | None  # None: not known


class SampledReport(StartReport, SeenReport):
    """Both of a rank."""


class StepRow(TypedDict):
    """row/STEP/RANK."""

    step: int
    size: int | None  # samples
    loss: str | None  # a float, as repr() has it: JSON knows no NaN
    sum: str | None  # checksum of the parameters


class RankProgress(TypedDict):
    """state/RANK."""

    step: int  # done
    in_step: bool
    ended: str  # why there are no more steps; ''
    broken: bool
    laps: int  # steps that `times` is of
    times: Sequence[float] | None  # ms, medians of a step: own, for its data, in all; None: too few
