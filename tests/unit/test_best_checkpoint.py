"""--keep_best: which evaluation is the best, and which checkpoints stay."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import each
from tests.unit.conftest import LAUNCH, only, wrong
from tests.unit.trained_runs import flip_a_bit, stored
from training.core import evaluations, manifest
from training.core.errors import UserError
from training.core.find_run import RunSelector
from training.core.rundir import RunDir
from training.inspector.distributed import World
from training.tasks import weights
from training.trainer import checkpoint
from training.trainer.async_checkpoint import AsyncCheckpointer
from training.trainer.best_score import BestScore, score_of
from training.trainer.checkpoint import TrainProgress

FACTS: Any = {"shape": {}, "optimizer": "", "world_size": 1, "data": {}, "tokenizer": None}
ALONE = World(0, 0, 1, torch.device("cpu"), "none", "-")
ASKER = RunSelector("RUN", "./duet sample ", "./duet sample")


def saved(folder: Path, step: int, data: Any = None, **scores: float) -> Path:
    """A checkpoint; with `scores` it was evaluated."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {**FACTS, "score": score_of(scores), "data": data or {}}
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
    paths = [saved(tmp_path, step, loss=loss) for step, loss in ((1, 3.0), (2, 2.0), (3, 0.1))]
    assert BestScore(tmp_path, 2, ALONE, {}).best == {"name": "val_loss", "value": 2.0}
    checkpoint.prune(paths[1], 1, keep_best=True, discarded=paths[2:])
    assert steps(tmp_path) == [2]


def test_higher_is_better_for_some_scores(tmp_path: Path) -> None:
    for step, psnr in ((1, 20.0), (2, 30.0), (3, 25.0)):
        checkpoint.prune(saved(tmp_path, step, psnr=psnr, loss=psnr), 1, keep_best=True)
    assert steps(tmp_path) == [2, 3]
    best = BestScore(tmp_path, 3, ALONE, {})
    found = [
        best.improves(score_of({"psnr": value}), step)
        for step, value in enumerate((29.0, 30.0, 31.0, 30.5), 4)
    ]
    assert found == [False, False, True, False]
    assert not best.improves(score_of({"psnr": math.inf}), 8) and not best.improves(None, 9)
    assert best.improves(score_of({"ssim": 0.1}), 10), "another score has no best yet"


def test_a_name_without_a_direction_is_a_warning(tmp_path: Path) -> None:
    warned: list[str] = []
    best = BestScore(tmp_path, 0, ALONE, {}, lambda code, text: warned.append(code))
    assert [best.improves(score_of({"iou": x}), 1) for x in (0.2, 0.8, 0.5)] == [True, True, False]
    assert warned == []
    found = [best.improves(score_of({"quality": value}), 2) for value in (0.8, 0.9, 0.7)]
    assert found == [True, False, True] and warned == ["warning.score_direction"]


@each(
    "before, now, compared",
    [
        ({"folder": "a-1", "tokens_sha256": "A"}, {"folder": "a-2", "tokens_sha256": "A"}, True),
        ({"folder": "a-1", "tokens_sha256": "A"}, {"folder": "b-1", "tokens_sha256": "B"}, False),
        ({"train": "A", "val": "V"}, {"train": "B", "val": "V"}, True),
        ({"train": "A", "val": "V"}, {"train": "A", "val": "W"}, False),
        ({"mean": [1.0]}, {"mean": (1.0,)}, True),
        ("digest", "digest", True),
        ("digest", "other", False),
        ("of all parts, in early 0.1", {"train": "A", "val": "V"}, True),
    ],
)
def test_scores_of_other_data_are_not_compared(
    before: Any, now: Any, compared: bool, tmp_path: Path
) -> None:
    """After a resume with other data, of which all scores may be worse."""
    saved(tmp_path, 1, before, loss=0.9)
    best = BestScore(tmp_path, 1, ALONE, {"data": now})
    assert best.improves(score_of({"loss": 1.3}), 2) != compared
    saved(tmp_path, 2, now, loss=1.3)
    checkpoint.prune(saved(tmp_path, 3, now), 1, keep_best=True)
    assert steps(tmp_path) == [1 if compared else 2, 3]


@each(
    "before, now, compared",
    [
        ({"samples": 4, "frames": -1}, {"samples": 4, "frames": -1}, True),
        ({"samples": 4, "frames": -1}, {"samples": 4, "frames": 10}, False),
        ({"samples": 4}, {"samples": 3}, False),
        (None, {"samples": 3}, True),  # of early 0.1
        (None, {"samples": 3, "frames": -1}, False),  # with another PSNR
    ],
)
def test_scores_of_another_amount_of_data_are_not_compared(
    before: Any, now: Any, compared: bool, tmp_path: Path
) -> None:
    facts = {**FACTS, "score": score_of({"loss": 0.9})} | ({"measured": before} if before else {})
    checkpoint.save(tmp_path, TrainProgress(1), {}, facts)
    best = BestScore(tmp_path, 1, ALONE, {"data": {}, "measured": now})
    assert best.improves(score_of({"loss": 1.3}), 2) != compared


def test_a_score_whose_save_failed_is_not_the_best(tmp_path: Path) -> None:
    saved(tmp_path, 1, loss=3.0)
    best = BestScore(tmp_path, 1, ALONE, {})
    assert best.improves(score_of({"loss": 1.0}), 2)
    assert not best.improves(score_of({"loss": 2.0}), 3)
    assert best.improves(score_of({"loss": 2.0}), 4, lost=2)
    assert not best.improves(score_of({"loss": 2.5}), 5, lost=2), "step 4 was saved since"


def test_the_first_save_removes_checkpoints_later_than_the_resumed_one(tmp_path: Path) -> None:
    """Else a damaged one would be kept as the best, and the intact best be deleted."""
    saved(tmp_path, 2, loss=2.0)
    damaged = saved(tmp_path, 3, loss=0.1)
    flip_a_bit(damaged / manifest.STATE)
    loaded = checkpoint.latest(tmp_path)
    assert loaded and loaded.position.step == 2
    warned: list[str] = []
    saver = AsyncCheckpointer(
        tmp_path,
        1,
        lambda step, path: None,
        lambda code, text: warned.append(code),
        keep_best=True,
        discarded=[damaged],
    )
    with saver:
        for step, loss in ((4, 2.5), (5, 2.6)):
            facts = {**FACTS, "score": score_of({"loss": loss})}
            saver.save(TrainProgress(step), {}, facts, required=True)
            assert steps(tmp_path) == [2, step]
    assert warned == []


def test_a_replaced_checkpoint_is_not_discarded(tmp_path: Path) -> None:
    again = saved(tmp_path, 3, loss=0.1)
    saver = AsyncCheckpointer(
        tmp_path, 2, lambda step, path: None, lambda code, text: None, discarded=[again]
    )
    with saver:
        for step in (3, 4):
            saver.save(TrainProgress(step), {}, FACTS, required=True)
    assert steps(tmp_path) == [3, 4]


@pytest.mark.parametrize("averaged_first", [True, False])
def test_scores_of_both_kinds_of_weights_are_compared_by_value(
    tmp_path: Path, averaged_first: bool
) -> None:
    """A resume may begin or drop the average: the best score is that of the weights in use."""
    run = stored(tmp_path)
    for step, value, averaged in ((150, 1.5, averaged_first), (300, 1.6, not averaged_first)):
        place = run.checkpoints / manifest.folder_name(step)
        facts = manifest.read(place)[0]
        assert facts
        new: Any = {**facts, "score": {"name": "val_bpb", "value": value}}
        new |= {"ema": 0.9} if averaged else {}
        del new["own_sha256"]
        manifest.write(place, new)
    assert BestScore(run.checkpoints, 300, ALONE, facts).best == {
        "name": "val_bpb",
        "value": 1.5,
    }
    found = weights.find("tiny/best", tmp_path, ASKER)
    assert (found.step, found.averaged) == (150, averaged_first)


def test_scores_of_earlier_versions_are_in_the_events(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    for step in (1, 2, 3):
        checkpoint.save(run.checkpoints, TrainProgress(step), {}, FACTS)
    lines = [{"event": "eval", "step": n, "val_loss": abs(n - 2.0)} for n in (1, 2, 3)]
    run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = evaluations.best_checkpoint(manifest.all_in(run.checkpoints))
    assert found and found[:3] == (run.checkpoints / "step_00000002", "val_loss", 0.0)


def test_the_best_checkpoint_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stored(tmp_path)
    assert weights.find("tiny/best", tmp_path, ASKER).step == 300
    with run.events.open("a") as events:
        events.write(json.dumps({"event": "eval", "step": 150, "val_bpb": 0.1}) + "\n")
    for word in (f"{run.path}/best", "tiny/best/"):
        assert weights.find(word, tmp_path, ASKER).step == 150
    assert weights.find("tiny", tmp_path, ASKER).step == 300
    assert weights.find("tiny/checkpoints/step_00000150", tmp_path, ASKER).step == 150
    run.events.unlink()
    with pytest.raises(UserError) as raised:
        weights.find("tiny/best", tmp_path, ASKER)
    assert [p.code for p in raised.value.problems] == ["weights.no_best"]
    monkeypatch.setattr(RunDir, "is_archived", True)
    with pytest.raises(UserError) as raised:
        weights.find("tiny/best", tmp_path, ASKER)
    assert [p.code for p in raised.value.problems] == ["run.archived"]
    monkeypatch.undo()
    (tmp_path / "tiny").rename(tmp_path / "best")
    assert weights.find(str(tmp_path / "best"), tmp_path, ASKER).step == 300


def test_bad_values_are_answered() -> None:
    for value in ("1", "1.5", "-0.1", "on"):
        problem = only(wrong("1", "--device=cpu", f"--ema={value}", script=LAUNCH))
        assert problem.field == "ema", value
    problem = only(wrong("1", "--device=cpu", "--keep_best", "--eval_every=0", script=LAUNCH))
    assert (problem.code, problem.field) == ("flag.contradiction", "keep_best")
    assert [fix.split()[-1] for fix in problem.fixes] == ["--eval_every=250", "--keep_best=false"]
