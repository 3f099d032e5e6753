"""train.py with evaluations of the first sequences of the validation text, as those of the other
contenders (benchmarks/contenders/loop.py) and of the stored trainings; Duet spreads its own."""

from __future__ import annotations

import runpy

from training.core.project import ROOT
from training.tasks.gpt import evaluated


def first(count: int, wanted: int) -> range:
    return range(min(count, wanted))


if __name__ == "__main__":
    evaluated.spread = first
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
