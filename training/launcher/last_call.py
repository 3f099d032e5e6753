"""The first start of a run on several machines with `--min_ranks`, some of which have not connected
in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.core import log
from training.core.errors import Exit, Problem, UserError, unwritable
from training.core.messages import msg
from training.core.rundir import RunDir
from training.launcher import fewer_ranks, replan
from training.launcher.coordinator import Coordinator
from training.launcher.peer_link import PeerLink
from training.launcher.recovery import Recovery
from training.launcher.restart import GiveUp, Restart

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan


def leave_out(run: RunDir, plan: Plan, line: PeerLink) -> None:
    """On the machine that coordinates: the plan without those machines, here and on the others.
    They may join later. Raises UserError."""
    if not isinstance(line, Coordinator) or not line.absent:
        return
    why = msg("launcher.last_call.why")
    team = fewer_ranks.at_start(plan, line.absent, why)
    if isinstance(team, GiveUp):
        raise UserError(Problem("nodes.missing", team.reason), Exit.RESOURCES)
    change = msg("launcher.elastic.without", names=fewer_ranks.named(plan, team.lost), why="")
    text = msg("launcher.last_call.starts", label=fewer_ranks.label(plan, team, change))
    line.decide(Recovery(run, plan).order(Restart(0, {}, text, team=team)) | {"attempt": 1})
    try:
        replan.apply_team(run, plan, team, why)
    except OSError as error:
        raise unwritable(run.own_plan, error, Exit.RESOURCES) from error
    log.warning(text)
