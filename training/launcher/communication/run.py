"""Communication test of a plan: one attempt and, where GPUs hang or fail, another without
peer-to-peer copies. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from training.core import log
from training.core.messages import msg
from training.host import nccl_settings, p2p_cache
from training.host.gpus import VISIBLE
from training.host.kernel_log import KernelLog
from training.host.kernel_quotes import KernelQuotes
from training.host.p2p_cache import P2P
from training.launcher.communication import analysis, runner, stages
from training.launcher.communication.analysis import CommunicationFinding
from training.launcher.communication.kernel import consult
from training.launcher.communication.result import (
    INTERFACE,
    AllReduceTimes,
    CommunicationResult,
    worth_without_p2p,
)

if TYPE_CHECKING:
    from training.core.contracts.plan import RanksPlan
    from training.host.p2p_cache import P2PVerdict

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def run(
    plan: RanksPlan,
    limit_s: float = stages.LIMIT_S,
    backend: str = "",
    *,
    patience_s: float = 0.0,
) -> CommunicationResult:
    """Test the ranks that this plan would start on this machine. Blocks; for the main thread,
    before torch is imported.

    Required in the plan: local_ranks, device, variables and, to remember a verdict, gpus, driver
    and torch. `limit_s`: of each attempt, and `patience_s` more for ranks that are slow but do not
    hang; `backend`: name of the collectives, where it does not
    follow from the device. A stop signal takes effect after the cleanup.
    """
    ranks, device = plan["local_ranks"], plan["device"]["value"]
    backend = backend or BACKENDS[device]
    if ranks == 1:
        return CommunicationResult(1, device, "none", None)
    set_here = {v["name"]: v["value"] for v in plan["variables"] if v["origin"] == "set here"}
    there = {**os.environ, **nccl_settings.effective(os.environ)}
    own = {name: there[name] for name in (P2P, INTERFACE, VISIBLE) if there.get(name)}
    outcome, finding, logged = _try(ranks, backend, device, set_here, limit_s, patience_s)
    seconds, first, kernel = outcome.seconds, None, logged
    if backend == "nccl" and worth_without_p2p(finding) and P2P not in own | set_here:
        log.warning(msg("launcher.communication.retrying", text=finding.text, variable=P2P))
        first, set_here = finding, set_here | p2p_cache.WITHOUT_P2P
        outcome, finding, logged = _try(ranks, backend, device, set_here, limit_s, patience_s)
        seconds, kernel = seconds + outcome.seconds, logged or kernel
    figures = _figures(outcome, stages.LARGE_BYTES[device]) if finding.kind == analysis.OK else None
    verdict, note = None, ""
    if backend == "nccl" and figures:
        verdict, note = _learn(plan, figures, set_here)
    elif backend == "nccl" and worth_without_p2p(first or finding):
        p2p_cache.forget(key(plan))
    return CommunicationResult(
        *(ranks, device, backend, finding, figures, first, own | set_here, note, seconds),
        verdict=verdict,
        kernel=kernel or KernelQuotes(),
    )


def _try(
    ranks: int,
    backend: str,
    device: str,
    variables: Mapping[str, str],
    limit_s: float,
    patience_s: float,
) -> tuple[runner.CommunicationOutcome, CommunicationFinding, KernelQuotes | None]:
    kernel = KernelLog()
    try:
        outcome = runner.run(ranks, device, variables, limit_s, patience_s)
    except OSError as error:
        why = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        text = msg("launcher.communication.cannot_start", why=why)
        found = CommunicationFinding(analysis.FAILED, text, stage=stages.START)
        return runner.CommunicationOutcome(ranks, limit_s), found, None
    else:
        found = analysis.analyze(outcome, device)
        return outcome, found, consult(outcome, found, kernel, backend)
    finally:
        kernel.close()


def _figures(outcome: runner.CommunicationOutcome, size: int) -> AllReduceTimes:
    small, large = (
        max(record[name] for record in outcome.records.values()) for name in ("small_s", "large_s")
    )
    rate, ranks = size / large / 1e9, outcome.ranks
    return AllReduceTimes(size, small * 1e3, rate, rate * 2 * (ranks - 1) / ranks)


def key(plan: RanksPlan) -> p2p_cache.Key:
    """What a result for the GPUs of this plan depends on."""
    gpus = map(p2p_cache.identity, plan["gpus"])
    return p2p_cache.key(gpus, plan.get("driver"), plan.get("torch"))


def _learn(
    plan: RanksPlan, figures: AllReduceTimes, set_here: Mapping[str, str]
) -> tuple[P2PVerdict, str]:
    """Remember the result for these GPUs; with a note on that."""
    of = key(plan)
    verdict = p2p_cache.verdict(
        of,
        {name: set_here[name] for name in p2p_cache.WITHOUT_P2P if name in set_here},
        gb_per_s=figures.algorithm_gb_per_s,
        small_ms=figures.small_ms,
    )
    busy = p2p_cache.busy_gpu(plan["gpus"])
    why = (
        msg("launcher.communication.busy", index=busy["index"], use=busy["use_percent"])
        if busy
        else ""
    )
    note = p2p_cache.remember(of, verdict, busy=why)
    return ({**verdict, "busy": True} if busy else verdict), note
