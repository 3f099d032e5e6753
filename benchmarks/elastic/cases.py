"""What happens to the machines of one run: every single loss, or random ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.elastic.machine import LOSSES, PAIR, POWER, RANK, STOPPED, STOPPED_S
from benchmarks.elastic.programs import DUET, OWN, SAVE_EVERY, TORCHRUN, TRAINING

FIRST_STEP = 25  # two checkpoints are written
PLACES = ("middle", "first")
SHAPES = ((2, 1), (4, 1))  # machines, ranks on each
ALONE = ((1, 2), (1, 3), (1, 4))  # only a rank can be lost
# Random: seconds from a loss (or its end) to the next one, and until the machine is back.
NEXT_S, BACK_S, MOST = (0.0, 20.0), (0.0, 25.0), 3


@dataclass(frozen=True)
class Loss:
    kind: str
    machine: int
    # after the previous loss; the first one is at a step
    after_s: float = 0.0
    back_s: float | None = None  # None: never


@dataclass(frozen=True)
class Case:
    name: str
    program: str
    machines: int
    ranks: int  # on each
    losses: tuple[Loss, ...] = ()
    at_step: int = FIRST_STEP
    place: str = ""  # of a single loss

    @property
    def reference(self) -> Case:
        """The untouched run. The launcher and the disks do not change what is computed."""
        program = {TORCHRUN: DUET, OWN: TRAINING}.get(self.program, self.program)
        name = f"{program}-{self.machines}x{self.ranks}-untouched"
        return Case(name, program, self.machines, self.ranks)

    @property
    def may_end(self) -> bool:
        """Two machines with their own disks: the second one cannot know whether the first is off,
        or cannot be reached and continues."""
        kinds = {loss.kind for loss in self.losses}
        return (self.program, self.machines, self.place) == (OWN, 2, "first") and POWER in kinds

    @property
    def exact(self) -> bool:
        """DDP divides the gradients into other buckets after the first step of each start. So the
        sums of a script are computed in another order then, which three or more numbers show."""
        return self.program in (TRAINING, OWN) or self.machines * self.ranks <= 2

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def single() -> Iterator[Case]:
    """Every loss of one machine: the cheapest and most informative ones first."""
    for programs in ((TRAINING, DUET, TORCHRUN), (OWN,)):
        for machines, ranks in (*SHAPES, *ALONE):
            for place, kind in itertools.product(PLACES, LOSSES):
                if machines == 1 and (kind != RANK or place != PLACES[0]):
                    continue
                if kind == PAIR and (machines < 3 or place != PLACES[0]):  # neither is the first
                    continue
                for program in programs:
                    number = machines // 2 if place == "middle" else 0
                    back = STOPPED_S if kind == STOPPED else None
                    name = f"{program}-{machines}x{ranks}-{kind}-{place}"
                    loss = Loss(kind, number, back_s=back)
                    yield Case(name, program, machines, ranks, (loss,), place=place)


def drawn(seed: int, number: int) -> Case:
    """Random losses of Duet's training; every machine comes back after a while. Of two machines
    with their own disks, the second one does not continue without the first."""
    choice = random.Random(f"{seed}-{number}")
    kinds = [kind for kind in LOSSES if kind != PAIR]
    machines, program = choice.choice((2, 4)), choice.choice((TRAINING, OWN))
    victims = range(1 if program == OWN and machines == 2 else 0, machines)
    losses, now, away = list[Loss](), 0.0, dict[int, float]()  # machine → when it is back
    for place in range(choice.randint(1, MOST)):
        after = choice.uniform(*NEXT_S) if place else 0.0
        now += after
        here = [machine for machine in victims if away.get(machine, -1.0) < now]
        if not here:
            continue
        kind, machine = choice.choice(kinds), choice.choice(here)
        back = 0.0 if kind == RANK else choice.uniform(*BACK_S)
        away[machine] = now + back
        losses.append(Loss(kind, machine, round(after, 1), round(back, 1)))
    step = choice.randrange(2 * SAVE_EVERY if program == OWN else 1, 60)
    return Case(f"random-{seed}-{number}", program, machines, 1, tuple(losses), step)
