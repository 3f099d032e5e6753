"""Checks of GPU hardware and links."""

from __future__ import annotations

from collections.abc import Sequence

from training.core.messages import msg
from training.core.units import plural
from training.host import gpu_words
from training.host.gpus import SLOWDOWNS, Gpu
from training.plan.preflight import gpu_state
from training.plan.preflight.gpu_state import Pair, State
from training.plan.preflight.report import OK, WARNING, Check

BUSY_PERCENT = 30  # of the time: then the driver raises the link to its full generation
FEW_LANES = 8
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
        bad += map(gpu_words.slowdown, state.slowdowns)
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
    elif errors is not None and not (state.remap_failed or state.remap_pending):
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
    if _few_lanes(state):
        bad.append(msg("plan.gpu.slot_lanes", most=most, card=state.card_width))
        fixes.append(msg("plan.gpu.other_slot"))
    generation, fastest = state.link_generation, state.link_generation_most
    # The generation drops while a GPU is idle, so a low one is a problem under load only.
    if generation and fastest and generation < fastest and (state.use_percent or 0) >= BUSY_PERCENT:
        bad.append(msg("plan.gpu.slow_link", now=generation, most=fastest, use=state.use_percent))
        fixes.append(msg("plan.gpu.link_speed"))
    good += _link(state)
    good += (
        [msg("plan.gpu.persistence_on") if state.persistent else msg("plan.gpu.persistence_off")]
        if state.persistent is not None
        else []
    )
    good += _power(state)
    text = msg("plan.word.semicolon").join([*bad, *good]) or msg("plan.gpu.no_state")
    return Check(f"GPU {n} state", WARNING if bad else OK, text, fixes)


def _few_lanes(state: State) -> bool:
    """Whether the slot has fewer lanes than an exchange of gradients needs, and the card more."""
    most, card = state.link_width_most, state.card_width
    return most is not None and card is not None and most < card and most < FEW_LANES


def _link(state: State) -> list[str]:
    link = [f"×{state.link_width}"] if state.link_width is not None else []
    if state.link_generation_most:
        now = state.link_generation or "-"
        link.append(msg("plan.gpu.generation", now=now, most=state.link_generation_most))
    card = (
        [f"×{state.card_width}"] if (state.card_width or 0) > (state.link_width_most or 99) else []
    )
    if (state.card_generation or 0) > (state.link_generation_most or 99):
        card.append(msg("plan.gpu.card_generation", generation=state.card_generation))
    comma = msg("plan.word.comma")
    link += [msg("plan.gpu.card", link=comma.join(card))] if card else []
    return [msg("plan.gpu.pcie", link=comma.join(link))] if link else []


def _power(state: State) -> list[str]:
    """Power limit, ECC, normal limits of the clocks, NUMA node."""
    lines, limit, default = [], state.power_limit_w, state.power_default_w
    if limit is not None:
        lines.append(
            msg("plan.gpu.power_lowered", limit=limit, default=default)
            if default is not None and limit < default
            else msg("plan.gpu.power_limit", limit=limit)
        )
    if state.limits:
        lines.append(msg("plan.gpu.clocks", limits=msg("plan.word.comma").join(state.limits)))
    if state.ecc is not None:
        lines.append(msg("plan.gpu.ecc_on") if state.ecc else msg("plan.gpu.ecc_off"))
    if state.numa is not None:
        lines.append(msg("plan.gpu.numa", node=state.numa))
    return lines


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
