"""One of the three configurations on one GPU: Duet, a bare torch loop with the same model, and
nanochat's model and optimizer if its files are given; peak memory against the plan's estimate."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.bench import Bench, Failed, Skipped, check
from benchmarks.gpu.machine import ROOT
from benchmarks.gpu.trainings import TINY, WARM_UP, Run, does_not_fit, first_gpu, train
from training.host import flops
from training.tasks.gpt.model_dims import ModelDims, flops_per_token

CONFIGS = ("conservative", "balanced", "aggressive")
DUET, BARE, NANOCHAT = "Duet", "bare loop", "nanochat"
BARE_IS = (
    "Bare loop: Duet's model in a loop without Duet, with torch.optim.Muon, which updates one "
    "matrix at a time."
)
LARGE = "Duet, device_batch_size=auto"
SLOWER = 1.02  # Duet's goal: at most this much of the bare loop's time
SAFE = 1.2  # a further round needs at most this much of the time of the first
ROOM = 1.10  # the margin of the plan: the peak stays below the estimate times this


def stage(config: str) -> Callable[[Bench], dict[str, Any]]:
    return lambda bench: run(bench, config)


def run(bench: Bench, config: str) -> dict[str, Any]:
    """Milliseconds per step, tokens/s and MFU of each loop; bytes estimated and used. A step is
    that of the configuration, on one GPU: its micro-batches are accumulated, but with
    --device_batch_size=auto they are as large as the memory allows."""
    steps, rounds = bench.size(20, 4) + WARM_UP, bench.size(2, 1)
    times: dict[str, list[float]] = {DUET: []}
    notes: list[str] = []
    one: Run | None = None
    try:
        for number in range(rounds):  # interleaved, so that a GPU that warms up favours none
            if number and bench.left_s < SAFE * (bench.limit_s - bench.left_s):
                notes.append("one round: a second one would not end within the limit of a stage")
                break
            one = _duet(bench, config, f"duet{number}", steps)
            times[DUET].append(one.step_ms())
            job = _job(one, steps)
            _beside(bench, f"bare_loop{number}", BARE, job, times, notes)
            if bench.nanochat:
                _beside(bench, f"nanochat_loop{number}", NANOCHAT, job, times, notes)
            one.remove()
    except Failed as error:
        raise Failed(str(error), _figures(bench, times, one, notes) if one else None) from None
    assert one
    load = one.plan["memory"]["load"]
    if not load["compiled"]:
        notes.append(f"not compiled, none of the loops: {one.plan['compile']['reason']}")
    if not bench.nanochat:
        notes.append("nanochat not measured: no --nanochat=DIR")
    round_s = (bench.limit_s - bench.left_s) / len(times[DUET])
    if _micro_batches(one) > 1 and bench.left_s > SAFE * round_s:
        try:
            large = _duet(bench, config, "large", steps, device_batch_size="auto")
            sequences = large.plan["memory"]["load"]["sequences"]
            if sequences == load["sequences"]:
                notes.append(f"{LARGE}: the same {sequences} sequences")
            else:
                times[LARGE] = [large.step_ms()]
                notes.append(f"{LARGE}: {sequences} sequences")
            large.remove()
        except (Failed, Skipped) as error:
            notes.append(f"{LARGE}: not measured: {error}")
    return _figures(bench, times, one, notes)


def _job(one: Run, steps: int) -> dict[str, Any]:
    """The work of Duet's run, for another loop."""
    load = one.plan["memory"]["load"]
    job = {name: load[name] for name in ("depth", "sequences", "seq_len", "vocab", "compiled")}
    job |= {name: load[name] for name in ("blocks", "selective", "chunks", "muon")}
    job |= {"precision": one.plan["precision"]["value"], "micro": _micro_batches(one)}
    return job | {"steps": steps - WARM_UP, "warm_up": WARM_UP}


def _duet(bench: Bench, config: str, name: str, steps: int, **more: object) -> Run:
    # two micro-batches, as the configurations have on one GPU
    tiny = {**TINY, "total_batch_size": 256} if bench.smoke else {}
    flags: dict[str, Any] = {"num_iterations": steps, **tiny, **more}
    path = ROOT / f"configs/dual_gpu/{config}.py"
    one = train(bench, name, str(path), **flags)
    if does_not_fit(one):
        raise Skipped(f"the plan refuses this configuration: {one.error}\n{one.output}")
    return one.ok()


def _beside(
    bench: Bench,
    name: str,
    loop: str,
    job: dict[str, Any],
    times: dict[str, list[float]],
    notes: list[str],
) -> None:
    """Measure another loop with the work of Duet's, unless it has failed before. Raises Failed if
    no time is left."""
    if _has_failed(loop, notes):
        return
    env = {**first_gpu(bench.machine), **({"PYTHONPATH": _path(bench)} if loop == NANOCHAT else {})}
    try:
        found = bench.result(name.rstrip("0123456789"), name, job, **env)
    except Failed as error:
        if bench.left_s <= 0:
            raise
        notes.append(f"{loop} not measured: {error}")
        return
    if found.get("attention") and loop not in times:
        notes.append(f"{loop} computes with {found['attention']}")
    times.setdefault(loop, []).append(found["step_ms"])


def _has_failed(loop: str, notes: list[str]) -> bool:
    return any(note.startswith(f"{loop} not measured") for note in notes)


def _micro_batches(one: Run) -> int:
    load = one.plan["memory"]["load"]
    return int(load["total_tokens"] // (load["sequences"] * load["seq_len"]))


def _path(bench: Bench) -> str:
    own = bench.environment().get("PYTHONPATH", "")
    return f"{bench.nanochat}:{own}" if own else str(bench.nanochat)


def _figures(
    bench: Bench, times: dict[str, list[float]], one: Run, notes: list[str]
) -> dict[str, Any]:
    load = one.plan["memory"]["load"]
    tokens = _micro_batches(one) * load["sequences"] * load["seq_len"]  # of a step
    cost = flops_per_token(ModelDims(load["depth"], load["vocab"], load["seq_len"])) * tokens
    precision = one.plan["precision"]["value"]
    peak = flops.peak(bench.machine.gpu, precision)
    if peak is None:
        what = f"the peak of {bench.machine.gpu} in {precision}"
        notes.append(f"no MFU: {what} is not in training/host/flops.py")
    loops: dict[str, dict[str, Any]] = {}
    for name, found in times.items():
        ms = statistics.median(found)
        loops[name] = {
            "step_ms": ms,
            "rounds_ms": found,
            "tokens_per_s": 1000 * tokens / ms,
            "mfu": peak and 1000 * cost / ms / peak,
        }
    ratio = loops[DUET]["step_ms"] / loops[BARE]["step_ms"] if BARE in loops else None
    memory = one.plan["memory"]
    estimate, used = memory["total_bytes"] - memory["context_bytes"], one.peak_bytes
    checks = []
    if ratio or _has_failed(BARE, notes):
        text = f"{ratio:.3f} × its time per step (goal {SLOWER})" if ratio else "it has failed"
        checks = [check("no slower than a bare loop", ratio is not None and ratio <= SLOWER, text)]
    text = f"{used / estimate:.2f} × the estimate (limit {ROOM})"
    checks.append(check("memory within the plan's margin", used <= ROOM * estimate, text))
    return {
        "loops": loops,
        "ratio_to_bare": ratio,
        "tokens_per_step": tokens,
        "precision": precision,
        "load": load,
        "memory": {"estimate_bytes": estimate, "peak_bytes": used},
        "notes": notes,
        "checks": checks,
    }
