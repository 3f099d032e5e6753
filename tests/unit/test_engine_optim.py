"""The learning-rate schedule."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from training.config.schema import Config
from training.tasks import optim


def test_the_schedule_warms_up_stays_constant_and_decays() -> None:
    config = Config(warmup_ratio=0.1, warmdown_ratio=0.4, final_lr_frac=0.05)
    rates = [optim.multiplier(step, 100, config) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0
    assert all(rate == 1.0 for rate in rates[9:60])
    assert all(a > b for a, b in pairwise(rates[60:]))
    assert 0.05 < rates[-1] < 0.1


@pytest.mark.parametrize("total", [1, 2, 7])
def test_short_runs_have_a_rate_above_zero(total: int) -> None:
    assert all(0 < optim.multiplier(step, total, Config()) <= 1 for step in range(total))


def test_a_users_optimizer_keeps_its_momentum() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    plain = torch.optim.SGD([weight], lr=0.1)
    heavy = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optim.Optimizers([plain, heavy]).schedule(100, 0.5)
    assert [one.param_groups[0]["momentum"] for one in (plain, heavy)] == [0, 0.9]


def test_rates_of_numpy_become_numbers() -> None:
    rate = np.float64(0.1)
    both = optim.Optimizers([torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=rate)])
    both.schedule(1, np.float64(0.5))
    group = both.param_groups[0]
    assert (type(group["lr"]), type(group["initial_lr"])) == (float, float)
    assert group["lr"] == pytest.approx(0.05)
