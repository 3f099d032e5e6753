"""Losses in lines of other programs that are not those of a training step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import each
from training.diagnose.log_parsers import line_parser

LINES: dict[str, dict[str, Any]] = {
    # the evaluation is named by a value, a word in brackets, a column or the object around it
    '{"split": "val", "step": 10, "loss": 2.0}': {"step": 10, "loss": None},
    '{"type": "eval", "step": 10, "loss": 2.0}': {"step": 10, "loss": None},
    '{"step": 10, "loss": 2.0, "mode": "validation"}': {"step": 10, "loss": None},
    "step=10 phase=valid loss=2.0": {"step": 10, "loss": None},
    '{"step": 10, "eval": {"loss": 2.0, "acc": 0.5}}': {"step": 10, "loss": None},
    "step 100 [val] loss 2.0": {"step": 100, "loss": None},
    "step 100 | val | loss 2.0 | acc 0.5": {"step": 100, "loss": None},
    "epoch 3 avg val loss 2.0": {"epoch": 3, "loss": None},
    "split: test, step: 10, train_loss: 1.0, loss: 2.0": {"step": 10, "loss": 1.0},
    # beside the loss of the training
    '{"step": 10, "train": {"loss": 1.0}, "eval": {"loss": 2.0}}': {"step": 10, "loss": 1.0},
    '{"step": 10, "eval": {"loss": 2.0}, "train": {"loss": 1.0}}': {"step": 10, "loss": 1.0},
    "step 10 | train | loss 1.0 | valid | loss 2.0": {"step": 10, "loss": 1.0},
    "step 10 [val] loss 2.0 [train] loss 1.0": {"step": 10, "loss": 1.0},
}


@each("line", LINES)
def test_loss_of_an_evaluation_is_a_score(line: str) -> None:
    fact = line_parser.parse(line)
    assert fact is not None
    assert {name: getattr(fact, name) for name in LINES[line]} == LINES[line]
    assert fact.scores == {"val_loss": 2.0}


@pytest.mark.parametrize(
    "line",
    [
        '{"split": "train", "step": 10, "loss": 1.0}',
        '{"step": 10, "loss": 1.0, "eval": "every 100 steps"}',
        "step 10 loss 1.0 [next val at 100]",
        "[2025-01-01 12:00:00,123][test][INFO] - step 10 loss 1.0",
        "step 10 | loss 1.0 | val every 100",
        '{"dataset": "test", "step": 10, "loss": 1.0}',
        "type: test-run, step: 10, loss: 1.0",
    ],
)
def test_loss_of_a_step_is_not_a_score(line: str) -> None:
    fact = line_parser.parse(line)
    assert fact is not None
    assert (fact.step, fact.loss, fact.scores) == (10, 1.0, {})


@each(
    "line",
    [
        "best loss 0.3 at step 10",
        "New best validation loss: 0.3",
        "min_loss=0.3",
        "Loaded checkpoint (step 2000, loss 1.93)",
        "[2025-01-01 12:00:00,123][INFO] Resuming from checkpoint last.pt: step 2000, loss 1.93",
        "INFO:root:Restored the training state: step=2000 loss=1.93",
        "=> loaded checkpoint 'model.pth' (epoch 3, step 2000)",
    ],
)
def test_line_about_another_step(line: str) -> None:
    assert line_parser.parse(line) is None


@each(
    "line",
    [
        "step 10 loss 1.0 best_loss 0.3",
        "step 10 loss 1.0 loading from disk 0.2s",
        "step 10 (resumed from a.pt) loss 1.0",
    ],
)
def test_line_of_a_step_that_also_names_another(line: str) -> None:
    fact = line_parser.parse(line)
    assert fact is not None
    assert (fact.step, fact.loss, fact.scores) == (10, 1.0, {})
