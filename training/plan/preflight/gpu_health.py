"""Checks of GPU hardware and links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from training.core.messages import msg
from training.core.units import plural, unknown
from training.host import gpu_words, kernel_quotes
from training.host.gpus import SLOWDOWNS, Gpu
from training.plan.preflight import gpu_state
from training.plan.preflight.gpu_state import Pair, State
from training.plan.preflight.report import OK, WARNING, Check, with_lines

BUSY_PERCENT = 30  # of the time: then the driver raises the link to its full generation
FEW_LANES = 8
HEAT = {SLOWDOWNS[0x20], SLOWDOWNS[0x40]}


@dataclass(frozen=True)
class Fault:
    """What is wrong with a GPU, and commands or advice against it, of which one is enough."""

    text: str
    fixes: list[str]
    evidence: tuple[str, ...] = ()


def checks(gpus: Sequence[Gpu]) -> list[Check]:
    states, pairs = gpu_state.read_state(gpus)
    found = [check for state in states for check in health(state)]
    return found + ([links(states, pairs)] if pairs else [])


def health(state: State) -> list[Check]:
    """The hardware state of a GPU: a check for each fault, since each has to be mended; the first
    also has what is as it should be."""
    name = f"GPU {state.index} state"
    faults = [*_slowdowns(state), *_memory(state), *_slow_links(state)]
    good = _good(state)
    if not faults:
        text = msg("plan.word.semicolon").join(good) or msg("plan.gpu.no_state")
        return [Check(name, OK, text)]
    texts = [fault.text for fault in faults]
    texts[0] = msg("plan.word.semicolon").join([texts[0], *good])
    return [
        Check(name, WARNING, with_lines(text, fault.evidence), fault.fixes)
        for text, fault in zip(texts, faults, strict=True)
    ]


def _good(state: State) -> list[str]:
    good = []
    if state.slowdowns is not None and not state.slowdowns:
        good.append(msg("plan.gpu.not_slowed"))
    damaged = state.uncorrected_errors or state.remap_failed or state.remap_pending
    if state.uncorrected_errors is not None and not damaged:
        good.append(msg("plan.gpu.no_memory_errors"))
    good += _link(state)
    if state.persistent is not None:
        on = state.persistent
        good.append(msg("plan.gpu.persistence_on") if on else msg("plan.gpu.persistence_off"))
    return good + _power(state)


def _slowdowns(state: State) -> list[Fault]:
    """For heat and for power: each has its own remedy."""
    details = msg("plan.gpu.details")
    query = f"nvidia-smi -i {state.index} -q -d PERFORMANCE,TEMPERATURE,POWER   # {details}"
    every = state.slowdowns or ()
    kinds = (
        ([one for one in every if one in HEAT], msg("plan.gpu.cooling")),
        ([one for one in every if one not in HEAT], msg("plan.gpu.power_supply")),
    )
    semicolon = msg("plan.word.semicolon")
    return [
        Fault(semicolon.join(map(gpu_words.slowdown, found)), [remedy, query])
        for found, remedy in kinds
        if found
    ]


def _memory(state: State) -> list[Fault]:
    """One fault: a reset both remaps memory and clears errors, and a new card ends all of them."""
    texts = []
    if errors := state.uncorrected_errors:
        texts.append(
            msg("plan.gpu.memory_errors", errors=plural(errors, "uncorrected memory error"))
        )
    if state.remap_failed:
        texts.append(msg("plan.gpu.remap_failed"))
    elif state.remap_pending:
        texts.append(msg("plan.gpu.remap_pending"))
    if not texts:
        return []
    reset = msg("plan.gpu.reset_or_replace") if errors else msg("plan.gpu.or_reboot")
    fix = (
        msg("plan.gpu.replace")
        if state.remap_failed
        else f"sudo nvidia-smi -i {state.index} --gpu-reset   # {reset}"
    )
    return [Fault(msg("plan.word.semicolon").join(texts), [fix])]


def _slow_links(state: State) -> list[Fault]:
    faults, now, most = [], state.link_width, state.link_width_most
    if now is not None and most is not None and now < most:
        text = msg("plan.gpu.lanes", now=now, most=most)
        faults.append(Fault(text, [msg("plan.gpu.reseat")]))
    if _few_lanes(state):
        text = msg("plan.gpu.slot_lanes", most=most, card=state.card_width)
        faults.append(Fault(text, [msg("plan.gpu.other_slot")]))
    generation, fastest = state.link_generation, state.link_generation_most
    # The generation drops while a GPU is idle, so a low one is a problem under load only.
    if generation and fastest and generation < fastest and (state.use_percent or 0) >= BUSY_PERCENT:
        text = msg("plan.gpu.slow_link", now=generation, most=fastest, use=state.use_percent)
        kernel = kernel_quotes.of_link(state.bus)
        fixes = [msg("plan.gpu.link_speed"), *kernel.commands]
        faults.append(Fault(text, fixes, kernel.lines))
    return faults


def _few_lanes(state: State) -> bool:
    """Whether the slot has fewer lanes than an exchange of gradients needs, and the card more."""
    most, card = state.link_width_most, state.card_width
    return most is not None and card is not None and most < card and most < FEW_LANES


def _link(state: State) -> list[str]:
    link = [f"×{state.link_width}"] if state.link_width is not None else []
    if state.link_generation_most:
        now = state.link_generation or unknown()
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
