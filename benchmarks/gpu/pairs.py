"""What needs two GPUs: scaling from one to two, and peer-to-peer copies on and off."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.gpu.bench import Bench, check
from benchmarks.gpu.machine import ROOT
from benchmarks.gpu.trainings import TINY, WARM_UP, train

CONFIG = "configs/dual_gpu/balanced.py"
TOKENS = 12 * 2048  # of a rank
GOAL = 0.90  # weak efficiency
ON, OFF = "on", "off"


def _step_ms(bench: Bench, name: str, ranks: int, **env: str) -> float:
    steps = bench.size(30, 4) + WARM_UP
    flags = {**TINY, "total_batch_size": 128 * ranks} if bench.smoke else {}
    flags = {"total_batch_size": TOKENS * ranks, "num_iterations": steps, **flags}
    one = train(bench, name, str(ROOT / CONFIG), ranks=ranks, env=env, **flags).ok()
    found = one.step_ms()
    one.remove()
    return found


def scaling(bench: Bench) -> dict[str, Any]:
    """Milliseconds of a step with the same work for each rank (weak scaling)."""
    rounds = bench.size(2, 1)
    times: dict[int, list[float]] = {1: [], 2: []}
    for number in range(rounds):
        for ranks, found in times.items():
            found.append(_step_ms(bench, f"scaling{ranks}{number}", ranks))
    one, two = (statistics.median(found) for found in times.values())
    return {
        "step_ms": {"1": one, "2": two},
        "speed_up": 2 * one / two,
        "efficiency": one / two,
        "checks": [
            check(
                "weak efficiency, 1 to 2 GPUs", one / two >= GOAL, f"{one / two:.3f} (goal {GOAL})"
            )
        ],
    }


def p2p(bench: Bench) -> dict[str, Any]:
    """Milliseconds of a step of two ranks with and without direct copies between their GPUs."""
    found = {
        ON: _step_ms(bench, "p2p_on", 2, NCCL_P2P_DISABLE="0"),
        OFF: _step_ms(bench, "p2p_off", 2, NCCL_P2P_DISABLE="1"),
    }
    text = f"{found[ON]:.1f} ms with P2P, {found[OFF]:.1f} ms without"
    fast = found[ON] <= 1.02 * found[OFF]
    return {
        "step_ms": found,
        "checks": [
            check(
                "P2P is not slower than copies through the host",
                fast,
                text,
            )
        ],
    }
