"""The communication test of a start on GPUs: at the first one on these GPUs, and in every
`--check`. A pair of GPUs that hangs is found before the run has a directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.core import log
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.units import plural
from training.host import p2p_cache
from training.launcher.communication import stages

if TYPE_CHECKING:
    from training.core.contracts.plan import RanksPlan
    from training.host.p2p_cache import Key, P2PVerdict
    from training.launcher.communication.result import CommunicationResult


class StartTest:
    """`only_check`: `--check` shows a failure with its other checks."""

    def __init__(self, *, only_check: bool) -> None:
        self.only_check = only_check
        self.result: CommunicationResult | None = None

    def __call__(self, plan: RanksPlan) -> P2PVerdict | None:
        """None if the test has come to no result. Raises UserError (exit 3) where the run would
        hang or train on wrong data."""
        from training.launcher.communication.result import gpu_hangs, p2p_may_help
        from training.launcher.communication.run import key, run

        ranks = plural(plan["local_ranks"], "rank")
        known = p2p_cache.known(key(plan))
        if self.only_check or (known and not known.get("busy")):
            log.info(msg("launcher.communication.check", ranks=ranks))
        elif known:
            log.info(msg("launcher.communication.times_again", ranks=ranks))
        else:
            log.info(msg("launcher.communication.first_start", ranks=ranks))
        result = self.result = run(plan, patience_s=stages.PATIENCE_S)
        if result.verdict and not self.only_check:
            _warn_if_lost(key(plan), result.verdict, result.note)
        if not result.ok and not self.only_check:
            (check,) = result.checks()
            assert result.finding
            attempts = (result.first, result.finding)
            proven = any(p2p_may_help(found) for found in attempts if found)
            if proven or gpu_hangs(result.finding):
                without = msg("launcher.communication.not_tested")
                fixes = [*check.fixes, f"--communication_test=0   # {without}"]
                raise UserError(Problem(check.code, check.text, "", fixes), Exit.RESOURCES)
            log.warning(
                msg(
                    "launcher.communication.no_result",
                    text=result.finding.text,
                    command=result.again,
                )
            )
        return result.verdict


def _warn_if_lost(of: Key, new: P2PVerdict, note: str) -> None:
    """A warning where the result could not be written. GPUs without a name never have one, and
    times of busy GPUs replace no others."""
    known = p2p_cache.known(of)
    if not of.complete or (known and known["time"] == new["time"]):
        return
    if known and not known.get("busy"):
        if new.get("busy") and known["variables"] == new["variables"]:
            return
        later = msg("launcher.communication.use_earlier")
    else:
        later = msg("launcher.communication.tests_again")
    log.warning(msg("launcher.communication.not_remembered", note=note, later=later))
