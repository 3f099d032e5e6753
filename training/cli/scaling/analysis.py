"""Analysis of the measurements: speed-up, efficiency, expected band, limits. Pure functions."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from training.cli.scaling.experiment import Experiment
from training.cli.scaling.measure import RankLayout, Round, Sizes

# Expected speed-up of data-parallel training, by number of ranks.
BANDS = {2: (1.8, 1.9), 4: (3.5, 3.8), 8: (7.0, 7.5)}
REFERENCE, BELOW, WITHIN, BETTER, NO_BAND = "reference", "below", "in_band", "better", "no_band"
NOISY = 0.05  # largest spread of the rounds, as a fraction of the median
BUSY = 0.1  # largest fraction of the cores used by other processes


@dataclass(frozen=True)
class ScalingResult:
    """The result of one number of ranks. Times in ms per optimizer step; medians of the rounds."""

    ranks: int
    step_ms: float
    tokens_per_s: float  # or samples, all ranks
    speed_up: float  # against one rank
    speed_up_range: tuple[float, float]  # of the rounds
    band: tuple[float, float] | None
    verdict: str
    share_cores: bool
    apart_ms: float | None = None  # as many simultaneous runs of one rank, no communication
    machine_ms: float | None = None  # loss of those against one run alone
    exchange_ms: float | None = None  # further loss of the ranks: communication
    gradient_bytes: int | None = None  # that each rank exchanges per step

    @property
    def gigabytes_per_s(self) -> float | None:
        """Of gradients, at least: all within a step."""
        return self.gradient_bytes / self.step_ms / 1e6 if self.gradient_bytes else None

    @property
    def efficiency(self) -> float:
        return self.speed_up / self.ranks

    @property
    def noisy(self) -> bool:
        low, high = self.speed_up_range
        return high - low > NOISY * self.speed_up


@dataclass(frozen=True)
class ScalingReport:
    experiment: Experiment
    parameters: int | None
    results: list[ScalingResult]
    other_work: float  # cores used by other processes meanwhile, on average

    @property
    def busy(self) -> bool:
        return self.other_work > BUSY * self.experiment.cores


def band(ranks: int) -> tuple[float, float] | None:
    """The expected speed-up, interpolated linearly; None outside the known numbers of ranks."""
    if ranks in BANDS:
        return BANDS[ranks]
    below, above = [n for n in BANDS if n < ranks], [n for n in BANDS if n > ranks]
    if not below or not above:
        return None
    left, right = max(below), min(above)
    share = (ranks - left) / (right - left)
    low, high = (a + share * (b - a) for a, b in zip(BANDS[left], BANDS[right], strict=True))
    return round(low, 2), round(high, 2)


def verdict(ranks: int, speed_up: float) -> str:
    """The verdict on the speed-up as shown, with two decimals."""
    expected = band(ranks)
    if ranks == 1:
        return REFERENCE
    if expected is None:
        return NO_BAND
    shown = round(speed_up, 2)
    return BELOW if shown < expected[0] else BETTER if shown > expected[1] else WITHIN


def analyze(
    rounds: list[Round], experiment: Experiment, sizes: Sizes, other_work: float
) -> ScalingReport:
    """`other_work`: cores used by other processes. Ratios and differences are taken within a round,
    so that slow changes of the machine cancel out."""
    results = [
        _result(n, rounds, experiment, sizes.gradient_bytes.get(n)) for n in experiment.ranks
    ]
    return ScalingReport(experiment, sizes.parameters, results, other_work)


def _result(
    ranks: int, rounds: list[Round], experiment: Experiment, gradient_bytes: int | None
) -> ScalingResult:
    rows = [
        (a, t, r.get(RankLayout(ranks, True)))
        for r in rounds
        if (a := r.get(RankLayout(1))) and (t := r.get(RankLayout(ranks)))
    ]
    step_ms = statistics.median(t for _, t, _ in rows)
    speed_ups = [ranks * alone / at_once for alone, at_once, _ in rows]
    speed_up = statistics.median(speed_ups)
    split = [(alone, at_once, apart) for alone, at_once, apart in rows if apart]
    return ScalingResult(
        ranks=ranks,
        step_ms=step_ms,
        tokens_per_s=1000 * ranks * experiment.tokens_per_rank / step_ms,
        speed_up=speed_up,
        speed_up_range=(min(speed_ups), max(speed_ups)),
        band=band(ranks),
        verdict=verdict(ranks, speed_up),
        share_cores=experiment.share_cores(ranks),
        apart_ms=statistics.median(apart for _, _, apart in split) if split else None,
        machine_ms=statistics.median(apart - alone for alone, _, apart in split) if split else None,
        exchange_ms=statistics.median(at_once - apart for _, at_once, apart in split)
        if split
        else None,
        gradient_bytes=gradient_bytes,
    )
