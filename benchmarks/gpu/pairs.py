"""What needs two GPUs: scaling from one to two, and peer-to-peer copies on and off."""

from __future__ import annotations

import os
import statistics
from typing import Any

from benchmarks.gpu.bench import Bench, Skipped, check
from benchmarks.gpu.machine import ROOT
from benchmarks.gpu.trainings import TINY, WARM_UP, Run, launch
from training.host.p2p_cache import P2P

CONFIG = "configs/dual_gpu/balanced.py"
TOKENS = 12 * 2048  # of a rank
GOAL = 0.90  # weak efficiency
ON, OFF = "on", "off"


def _run(bench: Bench, name: str, ranks: int, **env: str) -> Run:
    """By the launcher, which tests the communication first and tunes the exchange by the result."""
    steps = bench.size(30, 4) + WARM_UP
    flags = {**TINY, "total_batch_size": 128 * ranks} if bench.smoke else {}
    flags = {"total_batch_size": TOKENS * ranks, "num_iterations": steps, **flags}
    return launch(bench, name, str(ROOT / CONFIG), ranks=ranks, env=env, **flags).ok()


def _step_ms(run: Run) -> float:
    found = run.step_ms()
    run.remove()
    return found


def scaling(bench: Bench) -> dict[str, Any]:
    """Milliseconds of a step with the same work for each rank (weak scaling)."""
    rounds = bench.size(2, 1)
    times: dict[int, list[float]] = {1: [], 2: []}
    recomputed: dict[int, tuple[int, ...]] = {}
    for number in range(rounds):
        for ranks, found in times.items():
            run = _run(bench, f"scaling{ranks}{number}", ranks)
            load = run.plan["memory"]["load"]
            recomputed[ranks] = tuple(load[name] for name in ("blocks", "selective", "chunks"))
            found.append(_step_ms(run))
    one, two = (statistics.median(found) for found in times.values())
    notes = []
    if recomputed[1] != recomputed[2]:  # two ranks need memory for DDP's buckets
        text = (
            "blocks recomputed, selectively, and parts of the loss: {} with one rank, {} with two"
        )
        notes.append(text.format(*(recomputed[ranks] for ranks in times)))
    return {
        "notes": notes,
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
    if os.environ.get(P2P):
        raise Skipped(f"{P2P} is set")
    if not bench.machine.peer_access:
        raise Skipped("the driver offers no direct copies between the first two GPUs")
    on = _run(bench, "p2p_on", 2)
    if P2P in {one["name"] for one in on.plan["variables"]}:
        raise Skipped("direct copies failed in the test of the communication")
    found = {ON: _step_ms(on), OFF: _step_ms(_run(bench, "p2p_off", 2, **{P2P: "1"}))}
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
