"""Faults of the matrix (tests/faults) on two GPUs: one for each way in which a rank fails. Root
cause, rank and exit code are those of the CPU; times and places of the other rank may differ."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from tests.faults.conftest import SECONDS, Ended
from tests.faults.test_matrix import TABLE
from tests.gpu.conftest import need_gpus

NAMES = (
    *("lock", "SIGSTOP", "SIGKILL", "SIGSEGV", "exit 0", "exception", "NaN"),
    *("another collective", "GPU out of memory", "GPU memory error"),
)
SLACK_S = 5.0  # a GPU's process group ends more slowly than one of the CPU


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_on_two_gpus(
    inject: Callable[..., Ended],
    name: str,
    record_property: Callable[[str, object], None],
) -> None:
    need_gpus(2)
    if name == "NaN" and hasattr(ctypes.CDLL(None), "null_gpu_count"):
        pytest.skip("a null GPU computes no NaN")
    row = TABLE[name]
    ended = inject(row.spec, device="cuda", compile=0, **row.flags)
    record_property(SECONDS, round(ended.seconds, 2))
    verdict, failure = ended.verdict, ended.failure
    assert (verdict["kind"], verdict["rank"]) == (row.kind, row.rank), verdict
    assert (failure["cause"], failure["rank"]) == (row.cause, row.rank)
    assert ended.code == row.code
    assert ended.seconds <= row.limit_s + SLACK_S
