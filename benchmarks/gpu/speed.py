"""One of the three configurations on one GPU: Duet, a bare torch loop with the same model, and
nanochat's model and optimizer if its files are given; peak memory against the plan's estimate."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.bench import Bench, Failed, Skipped, check
from benchmarks.gpu.machine import ROOT
from benchmarks.gpu.trainings import TINY, WARM_UP, Run, does_not_fit, first_gpu, train
from training.config import loader
from training.host import flops
from training.tasks.gpt.model_dims import ModelDims, flops_per_token

CONFIGS = ("conservative", "balanced", "aggressive")
DUET, BARE, NANOCHAT = "Duet", "bare loop", "nanochat"
SLOWER = 1.02  # Duet's goal: at most this much of the bare loop's time
SAFE = 1.2  # a further round needs at most this much of the time of the first
ROOM = 1.10  # the margin of the plan: the peak stays below the estimate times this


def stage(config: str) -> Callable[[Bench], dict[str, Any]]:
    return lambda bench: run(bench, config)


def run(bench: Bench, config: str) -> dict[str, Any]:
    """Milliseconds per step, tokens/s and MFU of each loop; bytes estimated and used."""
    steps, rounds = bench.size(30, 4) + WARM_UP, bench.size(2, 1)
    times: dict[str, list[float]] = {DUET: [], BARE: []}
    notes: list[str] = []
    for number in range(rounds):  # interleaved, so that a GPU that warms up favours none
        if number and bench.left_s < SAFE * (bench.limit_s - bench.left_s):
            notes.append("one round: a second one would not end within the limit of a stage")
            break
        one = _duet(bench, config, f"duet{number}", steps)
        load = one.plan["memory"]["load"]
        times[DUET].append(one.step_ms())
        job = {name: load[name] for name in ("depth", "sequences", "seq_len", "vocab")}
        job |= {name: load[name] for name in ("blocks", "selective", "chunks", "muon")}
        job["precision"] = one.plan["precision"]["value"]
        job |= {"steps": steps - WARM_UP, "warm_up": WARM_UP, "compiled": load["compiled"]}
        bare = bench.result("bare_loop", f"bare{number}", job, **first_gpu())
        times[BARE].append(bare["step_ms"])
        if bench.nanochat and not notes:
            try:
                env = {**first_gpu(), "PYTHONPATH": _path(bench)}
                found = bench.result("nanochat_loop", f"nanochat{number}", job, **env)
                times.setdefault(NANOCHAT, []).append(found["step_ms"])
            except Failed as error:
                notes.append(f"nanochat not measured: {error}")
        one.remove()
    if not bench.nanochat:
        notes.append("nanochat not measured: no --nanochat=DIR")
    return _figures(bench, times, load, one, notes)


def _duet(bench: Bench, config: str, name: str, steps: int) -> Run:
    path = ROOT / f"configs/dual_gpu/{config}.py"
    values = {name: value for name, (value, _) in loader.load(path)[0].items()}
    values |= TINY if bench.smoke else {}
    total = int(values["device_batch_size"]) * int(values["max_seq_len"])  # one rank's share
    flags: dict[str, Any] = {"total_batch_size": total, "num_iterations": steps}
    flags |= TINY if bench.smoke else {}
    one = train(bench, name, str(path), **flags)
    if does_not_fit(one):
        raise Skipped(f"the plan refuses this configuration on this machine:\n{one.output}")
    return one.ok()


def _path(bench: Bench) -> str:
    own = bench.environment().get("PYTHONPATH", "")
    return f"{bench.nanochat}:{own}" if own else str(bench.nanochat)


def _figures(
    bench: Bench, times: dict[str, list[float]], load: dict[str, Any], one: Run, notes: list[str]
) -> dict[str, Any]:
    tokens = load["sequences"] * load["seq_len"]
    cost = flops_per_token(ModelDims(load["depth"], load["vocab"], load["seq_len"])) * tokens
    precision = one.plan["precision"]["value"]
    peak = flops.peak(bench.machine.gpu, precision)
    if peak is None:
        what = f"the peak of {bench.machine.gpu} in {precision}"
        notes.append(f"no MFU: {what} is not in training/host/flops.py")
    loops = {}
    for name, found in times.items():
        ms = statistics.median(found)
        loops[name] = {
            "step_ms": ms,
            "rounds_ms": found,
            "tokens_per_s": 1000 * tokens / ms,
            "mfu": peak and 1000 * cost / ms / peak,
        }
    ratio = loops[DUET]["step_ms"] / loops[BARE]["step_ms"]
    memory = one.plan["memory"]
    estimate, used = memory["total_bytes"] - memory["context_bytes"], one.peak_bytes
    return {
        "loops": loops,
        "ratio_to_bare": ratio,
        "tokens_per_step": tokens,
        "precision": precision,
        "load": load,
        "memory": {"estimate_bytes": estimate, "peak_bytes": used},
        "notes": notes,
        "checks": [
            check(
                "no slower than a bare loop",
                ratio <= SLOWER,
                f"{ratio:.3f} × its time per step (goal {SLOWER})",
            ),
            check(
                "memory within the plan's margin",
                used <= ROOM * estimate,
                f"{used / estimate:.2f} × the estimate (limit {ROOM})",
            ),
        ],
    }
