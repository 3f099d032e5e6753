"""JSON records that ranks exchange through the store (shared_store)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class LoaderFacts(TypedDict):
    """Facts about the data of a rank before it trains."""

    dataset: int | None  # samples; None: unknown
    batches: int | None  # per epoch
    sampler: str  # '' without a loader
    whole_dataset: bool  # the rank draws from the whole dataset
    fingerprint: str  # of the dataset; ''


class StartReport(LoaderFacts):
    """Key start/RANK."""

    first: list[list[int]]  # indices of the first batches; [] if unknown
    structure: str  # digest of the parameters' names, shapes and types
    compared: int  # number of parameters
    left_out: str  # reasons for parameters that are not compared; ''
    names: list[str]  # of the parameters; only from rank 0
    wrapped: bool  # by DDP


class SeenReport(TypedDict):
    """Key seen/RANK: the samples of the first batches."""

    digests: list[str]
    indices: list[int] | None  # None: unknown


class SampledReport(StartReport, SeenReport):
    """Both reports of a rank."""


class StepRow(TypedDict):
    """Key row/STEP/RANK."""

    step: int
    size: int | None  # samples
    loss: str | None  # repr() of a float, since JSON has no NaN
    sum: str | None  # checksum of the parameters


class RankProgress(TypedDict):
    """Key state/RANK."""

    step: int  # completed
    in_step: bool
    ended: str  # reason for the end of its steps; ''
    broken: bool  # ended in the middle of a step
    epoch: int  # of its loader, from 1, with `ended` that of its last step; 0: unknown
    # Nothing but another rank can make it continue: it has left its loop, or its main thread is in
    # a collective. Otherwise it may evaluate between two epochs.
    waits: bool
    laps: int  # number of steps in `times`
    times: Sequence[float] | None  # ms, medians per step: own, data, total; None: too few steps
