"""What a plan knows about the communication between its GPUs: measured at an earlier start, or by a
test now."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from training.core.messages import msg
from training.core.project import typed
from training.core.units import plural
from training.host import env_vars, p2p_cache
from training.host.gpus import VISIBLE, GpuInventory
from training.plan import preflight
from training.plan.request import LaunchRequest
from training.plan.script_program import has_package

if TYPE_CHECKING:
    from training.core.contracts.plan import (
        CommunicationRecord,
        PlanStart,
        RanksPlan,
        VariableRecord,
    )
    from training.host.p2p_cache import P2PVerdict

# tests the ranks of a plan (training.launcher.communication.start_test)
Test = Callable[["RanksPlan"], "P2PVerdict | None"]


def settle(
    request: LaunchRequest,
    begun: PlanStart,
    checks: list[preflight.Check],
    environ: Mapping[str, str],
    test: Test | None,
) -> None:
    """Add to a plan what is known of its GPUs, after a test if nothing is, and the variables that
    they need. Raises UserError (exit 3) if they cannot communicate."""
    if begun["device"]["value"] != "cuda" or begun["local_ranks"] == 1:
        return
    gpus = map(p2p_cache.identity, begun["gpus"])
    key = p2p_cache.key(gpus, begun["driver"], begun["torch"], environ)
    known = p2p_cache.known(key)
    needed = p2p_cache.remembered(key)
    # busy GPUs that have been tested are not again until they are idle
    enough = known is not None and (
        not known.get("busy") or bool(p2p_cache.busy_gpu(begun["gpus"]))
    )
    if test and _wanted(request, begun, checks, enough, key.complete):
        # A test on demand finds out whether the copies work now, and omits them by itself.
        if request.config.communication_test != "1":
            begun["variables"] += _missing(begun, needed, environ)
        found = test(begun)
        # A failed test has withdrawn what was known; one on busy GPUs leaves earlier times.
        known = found if found and not found.get("busy") else p2p_cache.known(key) or found
        needed = found["variables"] if found else p2p_cache.remembered(key)
    if known and known.get("busy"):
        begun["text"].append(_without_times(known, begun))
    elif known:
        begun["communication"] = {
            "gb_per_s": known["gb_per_s"],
            "small_ms": known["small_ms"],
            "time": known["time"],
            "p2p": p2p_cache.P2P not in known["variables"] | known["settings"],
        }
        begun["headline"].append(_sentence(known, begun))
        begun["text"].append(begun["headline"][-1])
    begun["variables"] += _missing(begun, needed, environ)
    if p2p_cache.variables(needed, environ):
        begun["notes"].append(
            msg("plan.communication.without_p2p", found=p2p_cache.FOUND, variable=p2p_cache.P2P)
        )


def for_accelerate(begun: PlanStart, machine: GpuInventory, python: str | None) -> None:
    """Add the variables without which accelerate refuses the GPUs of this machine, unless the
    copies work and `python` does not have it (None: unknown). After settle(), which finds out
    whether they work."""
    names = {gpu.index: gpu.name for gpu in (*machine.gpus, *machine.hidden)}
    there = [one["name"] for one in begun["variables"]]
    needed = env_vars.without_copies(list(names.values()), machine.driver, there)
    measured = begun.get("communication")
    copies = measured is not None and measured["p2p"]
    if not needed or (copies and python and not has_package(python, "accelerate")):
        return
    if measured and copies:  # which its ranks will not use
        sentence = _sentence(measured, begun)
        del begun["communication"]
        begun["headline"].remove(sentence)
        begun["text"].remove(sentence)
    begun["variables"] += [one.record() for one in needed]


def _wanted(
    request: LaunchRequest,
    begun: PlanStart,
    checks: list[preflight.Check],
    known: bool,
    nameable: bool,
) -> bool:
    wish = request.config.communication_test
    testable = request.trains_here and begun["torch"] is not None
    if not testable or preflight.unusable(checks) or wish == "0":
        return False
    if request.check or request.dry_run:
        return request.check
    # GPUs without a name cannot be remembered: they would be tested at every start.
    return wish == "1" or (nameable and not known)


def _missing(
    begun: PlanStart, needed: Mapping[str, str], environ: Mapping[str, str]
) -> list[VariableRecord]:
    there = {v["name"] for v in begun["variables"] if v["origin"] == "set here"}
    return [v.record() for v in p2p_cache.variables(needed, environ) if v.name not in there]


def command(ranks: int, device: str, visible: str = "") -> str:
    """Command of the test alone, to paste into a shell. `visible`: CUDA_VISIBLE_DEVICES of the
    ranks; the command takes the first of these GPUs."""
    gpus = f"{VISIBLE}={shlex.quote(visible)} " if visible and device == "cuda" else ""
    return gpus + typed(f"./duet communication {ranks} --device={device}")


def command_for(begun: PlanStart) -> str:
    """That for the GPUs of this plan."""
    variables = {v["name"]: v["value"] for v in begun["variables"]}
    return command(begun["local_ranks"], "cuda", variables.get(VISIBLE, ""))


def _without_times(known: P2PVerdict, begun: PlanStart) -> str:
    return msg(
        "plan.communication.busy", gpus=plural(begun["local_ranks"], "GPU"), when=_date(known)
    )


def _date(known: P2PVerdict | CommunicationRecord) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(known["time"]))


def _sentence(known: P2PVerdict | CommunicationRecord, begun: PlanStart) -> str:
    return msg(
        "plan.communication.known",
        rate=f"{known['gb_per_s']:.3g}",
        gpus=plural(begun["local_ranks"], "GPU"),
        when=_date(known),
        again=command_for(begun),
    )
