from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from training.data.loader import TokenDataset
from training.data.tokenizer import BOS
from training.distributed import World
from training.engine.evaluate import evaluate
from training.engine.model import GPT, Shape

WORLD = World(0, 0, 1, torch.device("cpu"), "none", "-")
PLAIN = torch.autocast("cpu", torch.bfloat16, enabled=False)


def dataset(folder: Path, tokens: list[int], length: int = 8) -> TokenDataset:
    np.array(tokens, "<u2").tofile(folder / "val.bin")
    return TokenDataset(folder / "val.bin", length)


def test_a_guess_costs_log2_of_the_vocabulary(tmp_path: Path) -> None:
    model = GPT(Shape(1, 320, 8))
    score = evaluate(model, dataset(tmp_path, list(range(100))), WORLD, 4, 1000, PLAIN)
    assert score and score.bpb == pytest.approx(math.log2(320), rel=1e-5) and score.loss == pytest.approx(math.log(320), rel=1e-5)


def test_separators_are_not_predicted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT(Shape(1, 320, 8))
    with torch.no_grad():
        model.head.weight.normal_()
    data = dataset(tmp_path, [BOS if i % 5 == 0 else i for i in range(97)])
    score = evaluate(model, data, WORLD, 4, 1000, PLAIN)
    inputs, targets = data.batch(list(range(12)))
    bytes_only = model(inputs, targets.masked_fill(targets == BOS, -1)).item()
    assert (
        score and score.loss == pytest.approx(bytes_only, rel=1e-5) and score.loss != pytest.approx(model(inputs, targets).item(), rel=1e-3)
    )


def test_ranks_share_the_work_and_batch_size_does_not_matter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT(Shape(1, 320, 8))
    with torch.no_grad():
        model.head.weight.normal_()
    data = dataset(tmp_path, torch.randint(0, 256, (20 * 8 + 1,)).tolist())
    scores = [evaluate(model, data, WORLD, batch, 10_000, PLAIN) for batch in (1, 3, 64)]
    assert all(s and s.loss == pytest.approx(scores[0].loss, rel=1e-5) for s in scores if scores[0])


def test_too_little_text_is_no_score(tmp_path: Path) -> None:
    assert evaluate(GPT(Shape(1, 320, 8)), dataset(tmp_path, [1, 2, 3]), WORLD, 4, 1000, PLAIN) is None
