"""Checks of GPU hardware and links."""

from __future__ import annotations

from collections.abc import Sequence

from training.core.messages import msg
from training.core.units import plural
from training.host.gpus import SLOWDOWNS, Gpu
from training.plan.preflight import gpu_state
from training.plan.preflight.gpu_state import Pair, State
from training.plan.preflight.report import OK, WARNING, Check

HEAT = {SLOWDOWNS[0x20], SLOWDOWNS[0x40]}


def checks(gpus: Sequence[Gpu]) -> list[Check]:
    states, pairs = gpu_state.read_state(gpus)
    found = [health(s) for s in states]
    return found + ([links(states, pairs)] if pairs else [])


def health(state: State) -> Check:
    """The hardware state of a GPU as one check."""
    n = state.index
    bad: list[str] = []
    fixes: list[str] = []
    good: list[str] = []
    if state.slowdowns:
        bad += state.slowdowns
        heat = any(one in HEAT for one in state.slowdowns)
        fixes.append(msg("plan.gpu.cooling") if heat else msg("plan.gpu.power_supply"))
        details = msg("plan.gpu.details")
        fixes.append(f"nvidia-smi -i {n} -q -d PERFORMANCE,TEMPERATURE,POWER   # {details}")
    elif state.slowdowns is not None:
        good.append(msg("plan.gpu.not_slowed"))
    if errors := state.uncorrected_errors:
        bad.append(msg("plan.gpu.memory_errors", errors=plural(errors, "uncorrected memory error")))
        reset = msg("plan.gpu.reset_or_replace")
        fixes.append(f"sudo nvidia-smi -i {n} --gpu-reset   # {reset}")
    elif errors is not None:
        good.append(msg("plan.gpu.no_memory_errors"))
    if state.remap_failed:
        bad.append(msg("plan.gpu.remap_failed"))
        fixes.append(msg("plan.gpu.replace"))
    elif state.remap_pending:
        bad.append(msg("plan.gpu.remap_pending"))
        reset = msg("plan.gpu.or_reboot")
        fixes.append(f"sudo nvidia-smi -i {n} --gpu-reset   # {reset}")
    now, most = state.link_width, state.link_width_most
    if now is not None and most is not None and now < most:
        bad.append(msg("plan.gpu.lanes", now=now, most=most))
        fixes.append(msg("plan.gpu.reseat"))
    # The generation drops while a GPU is idle, so a low one is not a problem.
    link = [f"×{now}"] if now is not None else []
    link += (
        [
            msg(
                "plan.gpu.generation",
                now=state.link_generation or "-",
                most=state.link_generation_most,
            )
        ]
        if state.link_generation_most
        else []
    )
    good += [msg("plan.gpu.pcie", link=msg("plan.word.comma").join(link))] if link else []
    good += (
        [msg("plan.gpu.persistence_on") if state.persistent else msg("plan.gpu.persistence_off")]
        if state.persistent is not None
        else []
    )
    text = msg("plan.word.semicolon").join([*bad, *good]) or msg("plan.gpu.no_state")
    return Check(f"GPU {n} state", WARNING if bad else OK, text, fixes)


def links(states: Sequence[State], pairs: Sequence[Pair]) -> Check:
    """How the GPUs are connected: never a problem, but it determines the speed of communication."""
    ways: dict[str, list[str]] = {}
    for pair in pairs:
        ways.setdefault(pair.way, []).append(f"{pair.first}–{pair.second}")
    shown = [
        f"{way}{'' if len(ways) == 1 else ' (' + ', '.join(names) + ')'}"
        for way, names in ways.items()
    ]
    up = [msg("plan.gpu.nvlinks_of", count=s.nvlinks, index=s.index) for s in states if s.nvlinks]
    return Check(
        "GPU links",
        OK,
        "; ".join(shown) + (msg("plan.gpu.nvlinks_up", links=", ".join(up)) if up else ""),
    )
