"""How ranks have stopped on request: the sentence for users, and the evidence on those that made no
progress."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from training.config.fault_spec import ATTEMPT
from training.core import exit_status, find_run, manifest, rundir
from training.core.errors import Exit
from training.core.messages import msg
from training.host.process import STOP_SIGNALS
from training.launcher.outcome import Outcome
from training.watchdog.hang_report import HangFinding

if TYPE_CHECKING:
    from training.core.contracts.verdict import FailureRecord


def stopped_early(outcome: Outcome) -> bool:
    """A stop request while a rank was still starting: it dies of the signal, or is killed, because
    there is nothing to save yet."""
    return outcome.idle or (
        outcome.ours
        and outcome.asked != Exit.DONE
        and outcome.guilty is not None
        and -outcome.guilty[1] in STOP_SIGNALS
    )


def statuses(outcome: Outcome) -> str:
    """Exit statuses of the ranks of this machine, after a colon; '' under torchrun, which does not
    report them."""
    by_end: dict[str, list[str]] = {}
    for rank, status in sorted(
        (rank, status) for rank, status in outcome.ended if rank is not None
    ):
        by_end.setdefault(
            msg("launcher.failure.status_0") if status == 0 else exit_status.how(status), []
        ).append(str(rank))
    return "".join(
        msg("launcher.failure.more_ranks", ranks=", ".join(ranks), how=how)
        if i
        else msg("launcher.failure.ranks", ranks=", ".join(ranks), how=how)
        for i, (how, ranks) in enumerate(by_end.items())
    )


def sentence(outcome: Outcome, run: rundir.RunDir) -> str:
    """Why the ranks were not stopped regularly, and what is lost."""
    if not outcome.ours:
        return msg("launcher.failure.script_stopped", statuses=statuses(outcome))
    if outcome.left is not None:
        return msg("launcher.failure.left_alone", rank=outcome.left)
    saved = manifest.newest_step(run.checkpoints)
    if stopped_early(outcome):
        if os.environ.get(ATTEMPT, "1") == "1":
            return msg("launcher.failure.before_begin")
        return msg("launcher.failure.before_restart", saved=saved)
    lost = msg("launcher.failure.nothing_since") if saved else msg("launcher.failure.nothing")
    if outcome.stalled:
        return msg("launcher.failure.stalled", who=_who(outcome.stalled), lost=lost)
    return msg("launcher.failure.at_once", lost=lost)


def _who(stalled: HangFinding) -> str:
    if stalled.compares or not stalled.phase:
        return stalled.short()
    return msg(
        "launcher.failure.stalled_rank",
        rank=stalled.rank,
        phase=stalled.phase,
        how=stalled.how,
        since_s=stalled.since_s,
    )


def add_stalled(record: FailureRecord, stalled: HangFinding, run: rundir.RunDir) -> None:
    """The user has stopped the run, but perhaps because of this rank."""
    record["rank"], record["where"] = stalled.rank, stalled.where
    record["phase"], record["since_s"] = stalled.phase, stalled.since_s
    record["waiting"] = {str(rank): place for rank, place in sorted(stalled.waiting.items())}
    record["stacks"] = stalled.folder
    record["evidence"] = stalled.evidence() or record["evidence"]
    if stalled.rank is not None and find_run.exists(log := run.rank_log(stalled.rank)):
        record["log"] = str(log)
