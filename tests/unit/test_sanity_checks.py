"""The proof of the ranks' shards, on rank 0 of two."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from training.trainer import sanity_checks
from training.trainer.checkpoint import TrainProgress


def test_a_rank_without_data_is_named_in_words(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = SimpleNamespace(indices=np.arange)
    batches = SimpleNamespace(
        dataset=range(412),
        step_sequences=4,
        indices=lambda epoch, used, steps: np.arange(used, used + 2 * steps),
        order=lambda epoch: whole,
    )
    session: Any = SimpleNamespace(
        world=SimpleNamespace(rank=0, world_size=2),
        batches=batches,
        batch=SimpleNamespace(accumulation=1),
        task=SimpleNamespace(pieces="sequences"),
        steps_left=lambda position: 3,
    )

    def exchanged(key: str, own: str) -> list[str]:
        other = {"rank": 1, "dataset_sequences": 0, "count": 0, "first_sequences": [], "digest": 0}
        return [own, json.dumps({**json.loads(own), **other})]

    monkeypatch.setattr(sanity_checks, "exchange_texts", exchanged)
    with pytest.raises(sanity_checks.ShardsOverlap) as raised:
        sanity_checks.prove_shards(session, TrainProgress(0))
    assert raised.value.rank == 1
    assert "see rank 1, with 0 of 0 sequences; rank 0: 6 of 412 sequences" in str(raised.value)
    assert "rank 1 of 2: dataset 0 sequences" in capfd.readouterr().err
