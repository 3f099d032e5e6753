"""Runs in fp8 on two null GPUs: torch's fp8 products with torchao, which `make extras` installs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.e2e.conftest import Launched
from tests.null_gpu.conftest import NullGpus
from tests.null_gpu.test_memory import PLAIN, peaks_as_estimated
from training.core.rundir import read_json, read_records
from training.host import packages

Train = Callable[..., Launched]
FP8 = replace(PLAIN, fp8=True)
LOADS = [
    FP8,
    replace(FP8, selective=12),
    replace(FP8, blocks=12),
    replace(FP8, selective=6, sequences=4),  # accumulates
    replace(FP8, vocab=32768),
]


@pytest.fixture(autouse=True)
def torchao() -> None:
    if not packages.found("torchao"):
        pytest.skip("no torchao: make extras installs it")


def test_a_run_and_resumes_in_other_precisions(train: Train) -> None:
    often = {"eval_every": 2, "save_every": 2, "sample_tokens": 3}
    flags = {**often, "activation_checkpointing": 1, "precision": "fp8"}
    run = train(num_iterations=4, name="eight", **flags).ok()
    plan = read_json(run.run.plan) or {}
    assert (plan["precision"]["value"], plan["activation_checkpointing"]["value"]) == ("fp8", 1)
    assert sorted(run.steps) == [1, 2, 3, 4]
    assert [r["step"] for r in read_records(run.run.metrics) if "eval_ms" in r] == [2, 4]
    for precision, before, end in (("bf16", "fp8", 6), ("fp8", "bf16", 8)):
        resumed = train(resume="eight", num_iterations=end, precision=precision).ok()
        assert (resumed.summary["steps"], resumed.summary["begun_at"]) == (end, end - 2)
        notes = (read_json(run.run.plan) or {})["notes"]
        assert any(f"precision {before} → {precision}" in note for note in notes), notes


def test_padded_micro_batches(train: Train) -> None:
    sizes = {"max_seq_len": 30, "device_batch_size": 3, "total_batch_size": 180}
    run = train(precision="fp8", num_iterations=2, **sizes).ok()
    assert run.summary["steps"] == 2


@pytest.mark.timeout(900)  # compiled for training and for evaluation
def test_a_compiled_run(train: Train) -> None:
    run = train(precision="fp8", compile=1, num_iterations=4, eval_every=4)
    assert run.wait(840) == 0, run.output[-3000:]
    assert run.summary["steps"] == 4


def test_the_formula_is_the_allocator_s_peak(gpus: NullGpus, token: str) -> None:
    peaks_as_estimated(LOADS, gpus)
