"""The learning-rate schedule."""

from __future__ import annotations

from itertools import pairwise

import pytest

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
