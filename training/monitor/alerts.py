"""Alerts of an active run, from its state: no progress, slow ranks, hot or shared GPUs, full disks
and memory, invalid figures."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from training.core import phases
from training.core.jsonl import whole
from training.core.messages import msg
from training.core.units import GIB, part
from training.host.gpu_processes import MPS
from training.monitor import host_stats

if TYPE_CHECKING:
    from training.core.contracts.state import AlertState, RunState

# A GPU that waits in a collective spins: full utilization at little more than idle power.
SPINNING_PERCENT = 95
SPINNING_POWER, SPINNING_W = 0.35, 100.0  # share of the power limit; watts if that is unknown
NO_STEP_S, NO_STEP_TIMES = 30.0, 10  # seconds, or times the usual step, whichever is longer
LATE_LINES = 5  # or times the usual interval between two lines of a log
SLOW_RANK = 1.5  # times the other ranks' compute time
MEASURED_STEPS = 50  # of this start, before a rank is called slow
SHOWN_PLACES, SHOWN_RANKS = 4, 8
FULL = {"ram": 0.95, "shm": 0.9, "disk": 0.97}
CODES_OF_FULL = tuple(f"alert.{name}_full" for name in FULL)
CLOCK_S = 5.0


def active_alerts(state: RunState) -> list[AlertState]:
    """Empty unless the run is starting or running."""
    if state["run"]["state"] not in ("starting", "running"):
        return []
    silent = no_step_s(state)
    return [
        *(_standstill(state, silent) if silent else _slow_ranks(state)),
        *_gpus(state, silent),
        *_system(state),
        *_numbers(state),
    ]


def _alert(code: str, text: str, rank: int | None = None, gpu: int | None = None) -> AlertState:
    return {"code": f"alert.{code}", "text": text, "rank": rank, "gpu": gpu}


def _standstill(state: RunState, silent: float) -> list[AlertState]:
    """Where each rank is; a rank elsewhere than the others is probably at fault."""
    places: dict[str, list[int]] = {}
    # ranks of a user script have no heartbeat
    for r in state["ranks"] if any(r["doing"] for r in state["ranks"]) else ():
        places.setdefault(r["doing"] or "", []).append(r["rank"])
    words = [_standing_in(place, ranks) for place, ranks in list(places.items())[:SHOWN_PLACES]]
    where = msg("monitor.join.semicolon").join(words)
    return [
        _alert(
            "no_step",
            msg("monitor.alert.no_step_where", seconds=silent, where=where)
            if where
            else msg("monitor.alert.no_step", seconds=silent),
        )
    ]


def _standing_in(place: str, ranks: list[int]) -> str:
    if len(ranks) == 1:
        (rank,) = ranks
        return (
            msg("monitor.alert.rank_in", rank=rank, place=place)
            if place
            else msg("monitor.alert.no_heartbeat_rank", rank=rank)
        )
    numbers = _numbers_of(ranks)
    return (
        msg("monitor.alert.ranks_in", ranks=numbers, place=place)
        if place
        else msg("monitor.alert.no_heartbeat_ranks", ranks=numbers)
    )


def _numbers_of(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:SHOWN_RANKS])) + (
        f" … ({len(ranks)})" if len(ranks) > SHOWN_RANKS else ""
    )


def _slow_ranks(state: RunState) -> list[AlertState]:
    found = []
    own = {
        r["rank"]: median
        for r in state["ranks"]
        if (median := r.get("compute_ms_median")) is not None
    }
    for rank, value in (
        own.items() if state["training"].get("steps_measured", 0) >= MEASURED_STEPS else ()
    ):
        others = [v for r, v in own.items() if r != rank]
        usual = statistics.median(others) if others else 0.0
        if usual > 0 and value > SLOW_RANK * usual and value - usual > 1.0:
            found.append(
                _alert(
                    "slow_rank",
                    msg("monitor.alert.slow_rank", rank=rank, own_ms=value, others_ms=usual),
                    rank,
                )
            )
    return found


def no_step_s(state: RunState) -> float | None:
    """Seconds without a step or another phase where that is too long; None otherwise, and where
    unknown."""
    last, usual = state["training"]["last_step_unix_s"], state["training"]["step_ms_p95"]
    if state["run"]["state"] != "running" or last is None:
        return None
    if any(phases.takes_long(r["phase"] or "") for r in state["ranks"]):
        return None
    # after a long evaluation or copy the last step is old, but every rank is in a new phase
    ages = [age for r in state["ranks"] if (age := r["beat_age_s"]) is not None]
    silent = min(state["time_unix_s"] - last, max(ages, default=math.inf))
    # a log reports only some of the steps
    told_every_s = state["training"].get("told_every_s") or 0.0
    return (
        silent
        if silent > max(NO_STEP_S, NO_STEP_TIMES * (usual or 0) / 1000, LATE_LINES * told_every_s)
        else None
    )


def _gpus(state: RunState, silent: float | None) -> list[AlertState]:
    found = []
    for g in state["gpus"]:
        ours = any(p["this_run"] for p in g["processes"])
        if not (g["in_plan"] or ours):
            continue
        n, use, power, limit = g["index"], g["use_percent"], g["power_w"], g["power_limit_w"]
        if silent and ours and use is not None and power is not None and use >= SPINNING_PERCENT:
            if power < (SPINNING_POWER * limit if limit else SPINNING_W):
                found.append(
                    _alert(
                        "gpu_spins",
                        msg(
                            "monitor.alert.gpu_spins",
                            gpu=n,
                            use=use,
                            power_w=power,
                            seconds=silent,
                        ),
                        gpu=n,
                    )
                )
        elif silent and ours and use is not None and use < 5:
            found.append(
                _alert(
                    "gpu_idle",
                    msg("monitor.alert.gpu_idle", gpu=n, use=use, seconds=silent),
                    gpu=n,
                )
            )
        if g["throttle_reasons"]:
            why = host_stats.slowdowns(g["throttle_reasons"])
            if g["temperature_c"] is not None:
                why += f"{msg('monitor.join.comma')}{g['temperature_c']} °C"
            found.append(
                _alert(
                    "gpu_throttled",
                    msg("monitor.alert.gpu_throttled", gpu=n, reasons=why),
                    gpu=n,
                )
            )
        for p in g["processes"]:
            if not p["this_run"] and p.get("known", True) and MPS not in p["command"]:
                found.append(
                    _alert(
                        "foreign_process",
                        foreign_process(n, p["pid"], p["user"], p["used_bytes"]),
                        gpu=n,
                    )
                )
    return found


def foreign_process(gpu: int, pid: int, user: str, used_bytes: int | None) -> str:
    """`user`: '-' if unknown."""
    return msg(
        "monitor.alert.foreign_process",
        gpu=gpu,
        owner=msg("monitor.alert.of_user", user=user) if user != "-" else "",
        pid=pid,
        size="" if used_bytes is None else msg("monitor.alert.with_memory", gib=used_bytes / GIB),
    )


def _system(state: RunState) -> list[AlertState]:
    found, system = [], state["system"]
    names = {
        "ram": msg("monitor.alert.memory"),
        "shm": "/dev/shm",
        "disk": msg("monitor.alert.disk"),
    }
    for name, limit in FULL.items():
        used, total = (
            whole(system.get(f"{name}_used_bytes")),
            whole(system.get(f"{name}_total_bytes")),
        )
        if used is not None and total and used > limit * total:
            found.append(
                _alert(
                    f"{name}_full",
                    msg(
                        "monitor.alert.nearly_full",
                        what=names[name],
                        part=part(used, total),
                    ),
                )
            )
    return found


def _numbers(state: RunState) -> list[AlertState]:
    found, training = [], state["training"]
    if training["loss_is_finite"] is False:
        found.append(_alert("loss_not_finite", msg("monitor.alert.loss", loss=training["loss"])))
    last = training["last_step_unix_s"]
    if last is not None and last - state["time_unix_s"] > CLOCK_S:
        found.append(
            _alert(
                "clock",
                msg("monitor.alert.clock", seconds=last - state["time_unix_s"]),
            )
        )
    return found
