"""Which trainings a comparison needs, given those that are complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DUET = "duet"
CPU, CUDA = "cpu", "cuda"
STDLIB, SOURCES = "stdlib", "sources"  # corpora, see texts.py
FACTOR = 2.0  # between neighboring rates


@dataclass(frozen=True)
class Training:
    contender: str  # a module of benchmarks.contenders, or DUET
    steps: int
    seed: int
    rate: float  # of a contender, see loop.Run; 1 for Duet's defaults
    precision: str
    device: str = CPU  # files of older trainings have neither
    corpus: str = STDLIB

    @property
    def name(self) -> str:
        where = "" if self.device == CPU else f"-{self.device}"
        where += "" if self.corpus == STDLIB else f"-{self.corpus}"
        run = f"{self.steps}-rate{self.rate:g}-seed{self.seed}"
        return f"{self.contender}{where}-{self.precision}-{run}"


def of_nanochat(contender: str) -> bool:
    return contender.startswith("nanochat")


@dataclass(frozen=True)
class Plan:
    baseline: str
    precision: str
    lengths: Sequence[int]  # steps of the baseline, ascending
    seeds: Sequence[int]  # the first one tunes the rate
    rate: float  # where the search starts at the first length
    shares: Sequence[float]  # Duet's steps as shares of the baseline's, ascending
    share: float  # of these, the first one to try
    device: str = CPU
    corpus: str = STDLIB

    def base(self, steps: int, seed: int, rate: float) -> Training:
        return self._training(self.baseline, steps, seed, rate)

    def duet(self, steps: int, seed: int, share: float) -> Training:
        return self._training(DUET, round(share * steps), seed, 1.0)

    @property
    def longest(self) -> int:
        """Steps."""
        return round(max(self.lengths) * max(1, *self.shares))

    def includes(self, training: Training) -> bool:
        """Whether the training is one of this comparison, or a shorter one."""
        return (
            training.contender in (self.baseline, DUET)
            and training.steps <= self.longest
            and training
            == self._training(training.contender, training.steps, training.seed, training.rate)
        )

    def _training(self, contender: str, steps: int, seed: int, rate: float) -> Training:
        return Training(contender, steps, seed, rate, self.precision, self.device, self.corpus)


Losses = Mapping[Training, float]  # final validation losses of the complete trainings


@dataclass(frozen=True)
class Pair:
    """A training of the baseline, and the shortest one of Duet that reaches its loss."""

    base: Training
    duet: Training | None  # None: no share is enough


def wanted(plan: Plan, losses: Losses) -> list[Training]:
    """Trainings that can start now. The first one is needed; a later one may turn out not to be."""
    return _walk(plan, losses)[1]


def pairs(plan: Plan, losses: Losses) -> list[Pair]:
    """The complete ones."""
    return _walk(plan, losses)[0]


def _walk(plan: Plan, losses: Losses) -> tuple[list[Pair], list[Training]]:
    complete: list[Pair] = []
    needed: dict[Training, None] = {}  # in the order of their importance
    rate, start = plan.rate, plan.shares.index(plan.share)
    for steps in plan.lengths:
        tried = {
            training.rate: loss
            for training, loss in losses.items()
            if training == plan.base(steps, plan.seeds[0], training.rate)
        }
        untried = next_rates(tried, rate)
        needed |= dict.fromkeys(plan.base(steps, plan.seeds[0], one) for one in untried)
        best = None if untried else min(tried, key=lambda one: tried[one])
        for seed in plan.seeds:
            target = None
            if best is not None:
                base = plan.base(steps, seed, best)
                target = losses.get(base)
                needed[base] = None
            finals = {
                number: losses[plan.duet(steps, seed, share)]
                for number, share in enumerate(plan.shares)
                if plan.duet(steps, seed, share) in losses
            }
            number = next_share(finals, target, start, len(plan.shares))
            if number is not None:
                needed[plan.duet(steps, seed, plan.shares[number])] = None
            elif best is not None and target is not None:
                found = [n for n, loss in sorted(finals.items()) if loss <= target]
                start = found[0] if found else len(plan.shares) - 1
                own = plan.duet(steps, seed, plan.shares[start]) if found else None
                complete.append(Pair(base, own))
        rate = best or rate
    return complete, [training for training in needed if training not in losses]


def next_rates(losses: Mapping[float, float], start: float) -> list[float]:
    """Rates to try: `start` and its neighbors, then those beyond the best one. Empty when both
    neighbors of the best rate are worse."""
    if not losses:
        return [start, start * FACTOR, start / FACTOR]
    best = min(losses, key=lambda rate: losses[rate])
    return [rate for rate in (best, best * FACTOR, best / FACTOR) if rate not in losses]


def next_share(
    finals: Mapping[int, float], target: float | None, start: int, count: int
) -> int | None:
    """Number of the share to try next: `start`, then shorter ones while the target is reached,
    or longer ones until it is. None when the answer is known or must wait for the target."""
    if start not in finals:
        return start
    if target is None:
        return None
    number = start
    way = -1 if finals[start] <= target else 1
    while 0 <= number < count:
        if number not in finals:
            return number
        if (finals[number] <= target) != (way < 0):
            return None
        number += way
    return None
