from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from training.config.schema import Config
from training.engine import optim
from training.engine.model import GPT, Shape


def test_schedule_warms_up_stays_and_decays() -> None:
    config = Config(warmup_ratio=0.1, warmdown_ratio=0.4, final_lr_frac=0.05)
    rates = [optim.multiplier(step, 100, config) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0
    assert all(rate == 1.0 for rate in rates[9:60])
    assert all(a > b for a, b in pairwise(rates[60:]))
    assert 0.05 < rates[-1] < 0.1


@pytest.mark.parametrize("total", [1, 2, 7])
def test_short_runs_have_a_rate_above_zero(total: int) -> None:
    assert all(0 < optim.multiplier(step, total, Config()) <= 1 for step in range(total))


def test_every_weight_is_in_one_group_with_its_rate() -> None:
    model, config = GPT(Shape(2, 64, 8)), Config()
    optimizer = optim.build(model, config)
    members = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in members} == {id(p) for p in model.parameters()} and len(members) == len(list(model.parameters()))
    scale = (768 / 128) ** 0.5  # depth 2 is 128 wide
    assert optim.set_rate(optimizer, 0.5) == pytest.approx(scale * config.matrix_lr / 2)
    wanted = [scale * r / 2 for r in (config.matrix_lr, config.embedding_lr, config.unembedding_lr)]
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx(wanted)


def test_rate_survives_a_checkpoint() -> None:
    model = GPT(Shape(1, 64, 8))
    optimizer = optim.build(model, Config())
    optim.set_rate(optimizer, 0.1)
    restored = optim.build(model, Config())
    restored.load_state_dict(optimizer.state_dict())
    assert optim.set_rate(restored, 1.0) == pytest.approx(Config().matrix_lr * (768 / 64) ** 0.5)
    assert isinstance(restored, torch.optim.AdamW)
