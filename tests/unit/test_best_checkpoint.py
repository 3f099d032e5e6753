"""--keep_best: which evaluation is the best, and which checkpoints stay."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.conftest import LAUNCH, only, wrong
from tests.unit.trained_runs import stored
from training.core import evaluations, manifest
from training.core.errors import UserError
from training.core.find_run import RunSelector
from training.core.rundir import RunDir
from training.inspector.distributed import World
from training.tasks import weights
from training.trainer import checkpoint
from training.trainer.best_score import BestScore, score_of
from training.trainer.checkpoint import TrainProgress

FACTS: Any = {"shape": {}, "optimizer": "", "world_size": 1, "data": {}, "tokenizer": None}
ALONE = World(0, 0, 1, torch.device("cpu"), "none", "-")
ASKER = RunSelector("RUN", "./duet sample ", "./duet sample")


def saved(folder: Path, step: int, **scores: float) -> Path:
    """A checkpoint; with `scores` it was evaluated."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {**FACTS, "score": score_of(scores)}
    return checkpoint.save(folder, TrainProgress(step), {}, facts)


def steps(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in manifest.all_in(folder)]


def test_the_best_stays_beside_the_newest(tmp_path: Path) -> None:
    for step, loss in ((1, 3.0), (2, 2.0), (3, 2.5), (4, math.nan)):
        checkpoint.prune(saved(tmp_path, step, loss=loss), 1, keep_best=True)
    assert steps(tmp_path) == [2, 4], "the best remains until a better one is on disk"
    checkpoint.prune(saved(tmp_path, 5), 1, keep_best=True)
    assert steps(tmp_path) == [2, 5]
    checkpoint.prune(saved(tmp_path, 6, loss=1.0), 1, keep_best=True)
    assert steps(tmp_path) == [6]
    checkpoint.prune(saved(tmp_path, 7), 1)
    assert steps(tmp_path) == [7]


def test_later_checkpoints_of_a_discarded_part_are_never_the_best(tmp_path: Path) -> None:
    for step, loss in ((1, 3.0), (2, 2.0), (3, 0.1)):
        saved(tmp_path, step, loss=loss)
    assert BestScore(tmp_path, 2, ALONE).best == {"name": "val_loss", "value": 2.0}
    checkpoint.prune(tmp_path / "step_00000002", 1, keep_best=True)
    assert steps(tmp_path) == [2]


def test_higher_is_better_for_some_scores(tmp_path: Path) -> None:
    for step, psnr in ((1, 20.0), (2, 30.0), (3, 25.0)):
        checkpoint.prune(saved(tmp_path, step, psnr=psnr, loss=psnr), 1, keep_best=True)
    assert steps(tmp_path) == [2, 3]
    best = BestScore(tmp_path, 3, ALONE)
    found = [best.improves(score_of({"psnr": value})) for value in (29.0, 30.0, 31.0, 30.5)]
    assert found == [False, False, True, False]
    assert not best.improves(score_of({"psnr": math.inf})) and not best.improves(None)
    assert best.improves(score_of({"ssim": 0.1})), "another score has no best yet"


def test_scores_of_earlier_versions_are_in_the_events(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    for step in (1, 2, 3):
        checkpoint.save(run.checkpoints, TrainProgress(step), {}, FACTS)
    lines = [{"event": "eval", "step": n, "val_loss": abs(n - 2.0)} for n in (1, 2, 3)]
    run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = evaluations.best_checkpoint(manifest.all_in(run.checkpoints))
    assert found == (run.checkpoints / "step_00000002", "val_loss", 0.0)


def test_the_best_checkpoint_by_name(tmp_path: Path) -> None:
    run = stored(tmp_path)
    assert weights.find("tiny/best", tmp_path, ASKER).step == 300
    with run.events.open("a") as events:
        events.write(json.dumps({"event": "eval", "step": 150, "val_bpb": 0.1}) + "\n")
    for word in (f"{run.path}/best", "tiny/best/"):
        assert weights.find(word, tmp_path, ASKER).step == 150
    assert weights.find("tiny", tmp_path, ASKER).step == 300
    run.events.unlink()
    with pytest.raises(UserError) as raised:
        weights.find("tiny/best", tmp_path, ASKER)
    assert [p.code for p in raised.value.problems] == ["weights.no_best"]
    (tmp_path / "tiny").rename(tmp_path / "best")
    assert weights.find(str(tmp_path / "best"), tmp_path, ASKER).step == 300


def test_bad_values_are_answered() -> None:
    for value in ("1", "1.5", "-0.1", "on"):
        problem = only(wrong("1", "--device=cpu", f"--ema={value}", script=LAUNCH))
        assert problem.field == "ema", value
    problem = only(wrong("1", "--device=cpu", "--keep_best", "--eval_every=0", script=LAUNCH))
    assert (problem.code, problem.field) == ("flag.contradiction", "keep_best")
    assert [fix.split()[-1] for fix in problem.fixes] == ["--eval_every=250", "--keep_best=false"]
