"""The same training on the CPU and on GPUs: with each part of the default arithmetic, on one rank
and on two, and with a kill."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.gpu.bench import Bench, Failed, Program, check
from benchmarks.gpu.trainings import Run, shape, train
from training.core import project

MODEL = {"depth": 4, "max_seq_len": 256, "device_batch_size": 8, "total_batch_size": 4096}
ADAMW = {"precision": "fp32", "optimizer": "adamw", "compile": 0}
MUON = {"precision": "fp32", "optimizer": "muon", "compile": 0}
DEFAULTS = {"precision": "auto", "optimizer": "muon", "compile": "auto"}
REPEATABLE = {**DEFAULTS, "deterministic": "true"}
CPU, CPU_MUON = "CPU, 1 rank", "CPU, 1 rank, Muon"
REFERENCES = {CPU: ADAMW, CPU_MUON: MUON}

# Largest difference of a loss from the CPU's, relative. Measured on a CPU, 40 steps of 512 tokens:
# another order of summation 0.0006 %, Muon's products in bf16, as on GPUs, 0.02 %, everything in
# bf16 0.1 %; another learning rate, 10 % higher, 0.6 %. One GPU differed by 0.0015 % in fp32.
ROUNDING, HALF_PRECISION = 2e-3, 5e-3


@dataclass(frozen=True)
class Way:
    """A training on GPUs; `limit`: of its distance from `reference`."""

    reference: str
    limit: float
    flags: Mapping[str, object]
    ranks: int = 1


TWO, REPEATED = "GPU, 2 ranks", "GPU, 2 ranks, defaults, deterministic"
WAYS = {
    "GPU, 1 rank": Way(CPU, ROUNDING, ADAMW),
    TWO: Way(CPU, ROUNDING, ADAMW, 2),
    "GPU, 1 rank, compiled": Way(CPU, ROUNDING, ADAMW | {"compile": 1}),
    "GPU, 1 rank, Muon": Way(CPU_MUON, ROUNDING, MUON),
    "GPU, 1 rank, defaults": Way(CPU_MUON, HALF_PRECISION, DEFAULTS),
    REPEATED: Way(CPU_MUON, HALF_PRECISION, REPEATABLE, 2),
}
# A run of these that is killed and resumed, against the one without a kill.
LIMITS_OF_RESUMED = {TWO: ROUNDING, REPEATED: 0.0}
RESUMED = "{}, killed and resumed"


def run(bench: Bench) -> dict[str, Any]:
    """Loss curves of all runs, and how far they are from the CPU's."""
    steps = bench.size(40, 12)
    flags = shape(bench, MODEL) | {"num_iterations": steps, "save_every": steps // 4}
    # The checksums of a null GPU are what its memory contained: ranks may differ.
    compared = not bench.machine.null_gpu
    flags |= {"inspect_every": int(compared)}
    flags |= {"total_batch_size": 256} if bench.smoke else {}
    # Compiling takes minutes on a small CPU.
    eager = {"compile": 0} if bench.smoke else {}
    curves = {
        name: train(bench, _folder(name), **{**flags, **own, "device": "cpu"}).ok().losses
        for name, own in REFERENCES.items()
    }
    notes: list[str] = []
    ways = _ways(bench, notes)
    checks = _connected(bench, notes)
    if checks:
        ways = {name: way for name, way in ways.items() if way.ranks == 1}
    for name, way in ways.items():
        own = {**flags, **way.flags, **eager}
        try:
            curves[name] = train(bench, _folder(name), ranks=way.ranks, **own).ok().losses
        except Failed as error:
            checks.append(_failed(name, error, notes))
            continue
        checks.append(near(name, curves[name], curves[way.reference], way.limit))
    if compared:  # a run whose replicas differ ends with an error
        shared = all(name in curves for name, way in WAYS.items() if way.ranks > 1)
        checks.append(check("replicas are equal", shared, f"compared after each of {steps} steps"))
    for name in filter(curves.__contains__, LIMITS_OF_RESUMED):
        own = {**flags, **ways[name].flags, **eager}
        try:
            checks.append(_resumed(bench, name, steps, own, curves))
        except Failed as error:
            checks.append(_failed(RESUMED.format(name), error, notes))
    found = {
        "curves": curves,
        "relative_difference": {
            name: _apart(curves[way.reference], curves[name])
            for name, way in WAYS.items()
            if name in curves
        },
        "resumed_is_identical": {
            name: curves[name] == curves[RESUMED.format(name)]
            for name in LIMITS_OF_RESUMED
            if RESUMED.format(name) in curves
        },
        "ranks_share_a_gpu": len(bench.machine.gpus) < 2,
        "notes": notes,
        "checks": checks,
    }
    if bench.left_s <= 0:  # the next call measures all of it again
        raise Failed(notes[-1] if notes else "no time was left", found)
    return found


def _ways(bench: Bench, notes: list[str]) -> dict[str, Way]:
    """What this machine can do."""
    ways = dict(WAYS)
    if reason := bench.machine.no_compiler:
        notes.append(f"nothing is compiled: {reason}")
        ways = {n: way for n, way in ways.items() if way.flags.get("compile") != 1}
    if not bench.machine.bf16:
        # A loss scale that is too high at first skips a step, which the CPU takes.
        notes.append("this GPU has no bf16: the defaults are measured with --precision=fp32")
        plain = {"precision": "fp32"}
        ways = {
            n: replace(
                way, flags={**way.flags, **plain} if way.limit == HALF_PRECISION else way.flags
            )
            for n, way in ways.items()
        }
    return ways


def _connected(bench: Bench, notes: list[str]) -> list[dict[str, Any]]:
    """A failed check if two GPUs cannot reach each other. The launcher's test also remembers that
    peer-to-peer copies hang: the ranks of this stage, which no launcher starts, then do without."""
    if len(bench.machine.gpus) < 2:
        return []
    console = bench.folder / "communication.txt"
    argv = [*project.script("duet"), "communication", "2", "--device=cuda"]
    program = Program(argv, console, {"DUET_PYTHON": bench.machine.executable})
    try:
        (status,) = bench.run([program])
        reason = f"exit status {status}\n{program.end_of_output()}" if status else ""
    except Failed as error:
        reason = str(error)
    if not reason:
        return []
    return [_failed("test of the communication", Failed(reason), notes)]


def _failed(name: str, error: Failed, notes: list[str]) -> dict[str, Any]:
    """The check of a training that has failed: the others are still measured."""
    notes.append(f"{name}: {error}")
    return check(name, False, str(error).partition("\n")[0])


def _resumed(
    bench: Bench,
    name: str,
    steps: int,
    flags: dict[str, Any],
    curves: dict[str, list[float]],
) -> dict[str, Any]:
    """Whether a run that is killed and resumed has the losses of the one that is not; adds its
    curve. Raises Failed."""
    again, limit = RESUMED.format(name), LIMITS_OF_RESUMED[name]
    killed, resumed = _killed(bench, _folder(again), steps, flags)
    curves[again] = resumed.losses
    apart = _apart(curves[name], resumed.losses)
    ok = killed.code != 0 and len(resumed.losses) == steps and apart <= limit
    same = "bit for bit" if resumed.losses == curves[name] else f"{100 * apart:.4f} % apart"
    text = f"exit status {killed.code}; losses against the run without a kill: {same}"
    how = "" if limit else " with the same bits"
    return check(f"a killed run resumes{how}: {name}", ok, text)


def near(name: str, curve: list[float], reference: list[float], limit: float) -> dict[str, Any]:
    """Whether a training has the losses of the one on the CPU."""
    apart = _apart(reference, curve)
    text = f"{100 * apart:.4f} % from the CPU's (limit {100 * limit:g} %)"
    return check(name, apart <= limit, text)


def _folder(name: str) -> str:
    return name.lower().replace(",", "").replace(" ", "_")


def _killed(bench: Bench, name: str, steps: int, flags: dict[str, Any]) -> tuple[Run, Run]:
    """A rank is killed in the last quarter, then the other one, and the run is resumed: both."""
    fault = f"kill@rank=1,step={steps - steps // 8}"
    killed = train(bench, name, ranks=2, **flags | {"inject": fault})
    again = flags | {"inject": "", "resume": name}
    return killed, train(bench, name, ranks=2, **again).ok()


def _apart(curve: list[float], other: list[float]) -> float:
    """Largest relative difference of two curves; infinite if one is shorter or has no number."""
    if len(curve) != len(other) or not all(map(math.isfinite, (*curve, *other))):
        return float("inf")
    return max(abs(a - b) / max(abs(a), 1e-9) for a, b in zip(curve, other, strict=True))
