"""The best evaluation so far (--keep_best): one that is better is saved at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from training.core import evaluations, manifest, metric_units
from training.core.messages import msg

if TYPE_CHECKING:
    from training.core.contracts.run_files import ManifestRecord, ScoreRecord
    from training.inspector.distributed import World


def score_of(scores: Mapping[str, float] | None) -> ScoreRecord | None:
    """The score that evaluations are compared by; None: no evaluation, or it is not finite."""
    named = {f"{metric_units.EVALUATION}{name}": value for name, value in (scores or {}).items()}
    found = metric_units.main_score(named)
    return {"name": found[0], "value": found[1]} if found else None


class BestScore:
    """Rank 0 knows the best score with a checkpoint, after a resume from the manifests of those
    that exist, up to `step`, and have a score of the data in `facts`; its decision is the one of
    all ranks. `warn(code, text)` is called on rank 0."""

    def __init__(
        self,
        checkpoints: Path,
        step: int,
        world: World,
        facts: ManifestRecord,
        warn: Callable[[str, str], None] = lambda code, text: None,
    ) -> None:
        self.world, self._warn = world, warn
        self._names: set[str] = set()
        self.best: ScoreRecord | None = None
        self._before: ScoreRecord | None = None  # the best one before that of step `_at`
        self._at: int | None = None
        if world.rank == 0:
            there = [
                path for path in manifest.all_in(checkpoints) if manifest.step_of(path) <= step
            ]
            if found := evaluations.best_checkpoint(there, facts):
                self.best = {"name": found.name, "value": found.value}

    def improves(self, score: ScoreRecord | None, step: int, lost: int | None = None) -> bool:
        """Whether `score`, of `step`, is the best so far; then it counts as saved, unless a later
        call has its step in `lost`: that of the last save that failed. A collective."""
        if self._at is not None and lost == self._at:
            self.best, self._at = self._before, None
        self._check_direction(score)
        better = score is not None and (
            self.best is None or self.best["name"] != score["name"] or _better(score, self.best)
        )
        if self.world.world_size > 1:
            decided = torch.tensor(float(better), device=self.world.device)
            dist.broadcast(decided, 0)
            better = bool(decided.item())
        if better:
            self._before, self.best, self._at = self.best, score, step
        return better

    def _check_direction(self, score: ScoreRecord | None) -> None:
        """A warning for each name of which it is unknown whether higher values are better."""
        if score is None or score["name"] in self._names or self.world.rank:
            return
        name = score["name"]
        self._names.add(name)
        if metric_units.better_if_higher(name) is None:
            other = name.removeprefix(metric_units.EVALUATION) + metric_units.SCORE
            text = msg("trainer.best.direction", name=name, other=other)
            self._warn("warning.score_direction", text)


def _better(one: ScoreRecord, other: ScoreRecord) -> bool:
    name = one["name"]
    return metric_units.rank_of(name, one["value"]) < metric_units.rank_of(name, other["value"])
