"""Restarts of a user script, with torchrun's contract: the script loads its own snapshot, and
TORCHELASTIC_RESTART_COUNT is the number of restarts.

Unlike under torchrun, the same exception is not tried a second time without progress in between,
and what a restart cannot remove (a full disk, a faulty GPU) ends the run at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from training.core.messages import msg
from training.core.rundir import ASKED
from training.core.units import plural
from training.launcher import fewer_ranks
from training.launcher.recovery_policy import NEVER, lasts, may_pass, pause_before
from training.launcher.restart import Failure, GiveUp, Restart, killed
from training.launcher.script_snapshot import moved

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan


def remedy(failure: Failure, plan: Plan, before: Sequence[Failure]) -> Restart | GiveUp:
    """`before`: earlier failures of this launch, oldest first."""
    retries = plan["retries"]["value"]
    if not retries or failure.kind == ASKED:
        return GiveUp("")
    if smaller := fewer_ranks.remedy(failure, plan, before):
        return smaller
    if lasts(failure) and not fewer_ranks.may_be_gpu(failure, plan):
        return GiveUp(NEVER[failure.cause])
    if failure.spawns:
        return GiveUp(msg("launcher.retry.never.spawns"))
    passing = killed(failure) or may_pass(failure) or failure.occupied
    since = [f for f in before if not _advanced(f, failure)]
    again = any((f.cause, f.summary) == (failure.cause, failure.summary) for f in since)
    if again and not passing:
        return GiveUp(msg("launcher.retry.same_exception"))
    before = [f for f in before if not f.changed]  # the loss of a GPU does not count
    if len(before) >= retries:
        return GiveUp(
            msg(
                "launcher.retry.all_used",
                restarts=plural(retries, "restart"),
                reason=plan["retries"]["reason"],
            )
        )
    return Restart(len(before) + 1, pause_s=pause_before(failure, before))


def _advanced(before: Failure, now: Failure) -> bool:
    """Has the script saved a newer checkpoint, or printed later steps? More than one: at the same
    failure, another rank may have printed one step more."""
    later = before.printed and now.printed and now.printed[0] > before.printed[-1]
    return bool(later) or moved(before.snapshot, now.snapshot)
