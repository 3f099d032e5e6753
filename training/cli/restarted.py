"""A rank that torchrun has started again (`--max-restarts`, or with other machines): it resumes the
run that the same torchrun began."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

from training.config.resolve import RESTARTED
from training.core import find_run, log, rundir, standing
from training.core.errors import Exit, UserError
from training.core.jsonl import Record, dig, items
from training.core.messages import msg
from training.host.placement import Topology
from training.plan import cli_args

if TYPE_CHECKING:
    from training.core.contracts.plan import StarterRecord

RESUME = "DUET_RESUME"
RUN_ID, COUNT = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
NEWEST = 20  # runs: others may have begun since then


def agent(environ: Mapping[str, str], parent: int) -> StarterRecord | None:
    """The process of torchrun on this machine, which outlives the ranks; None without torchrun."""
    return standing.identity(parent) if RUN_ID in environ else None


def resume(
    script: str, args: list[str], environ: MutableMapping[str, str], agent: StarterRecord
) -> int | None:
    """Set the variables for the run of the attempt before, unless the user names one. Returns the
    exit code where that run is not to be continued."""
    try:
        asked = cli_args.parse_args(script, args, environ)
    except UserError:  # reported with all other problems
        return None
    run = None if asked.resolved.config.resume else _begun(asked.experiments, args, agent, environ)
    if run is None:
        return None
    code, first = _ended(run, environ), environ.get("RANK") == "0"
    if code is None:
        environ.update({RESUME: str(run.path), RESTARTED: "1"})
        if first:
            log.warning(msg("cli.restarted.resumes", name=run.name))
    elif first and code == Exit.DONE:
        log.success(msg("cli.restarted.complete", name=run.name))
    elif first:
        log.warning(msg("cli.restarted.stopped", name=run.name, code=code))
    return code


def _begun(
    experiments: Path, args: list[str], agent: StarterRecord, environ: Mapping[str, str]
) -> rundir.RunDir | None:
    """The newest run of the same command that this torchrun has begun."""
    for _, path in sorted(find_run.planned(experiments), reverse=True)[:NEWEST]:
        run = rundir.RunDir(path)
        plan = rundir.read_json(run.plan)
        same = agent in items(dig(plan, "agents")) and dig(plan, "command", "args") == args
        if same and _may_be_restart(plan, environ):
            return run
    return None


def _may_be_restart(plan: Record | None, environ: Mapping[str, str]) -> bool:
    """False for another training by the same process (elastic_launch, a notebook). It has another
    run ID, unless that is fixed, and its ranks have not been restarted."""
    if dig(plan, "torchrun_id") not in (None, environ.get(RUN_ID)):  # None: of an earlier version
        return False
    return environ.get(COUNT) != "0" or _may_change(plan, environ)


def _may_change(plan: Record | None, environ: Mapping[str, str]) -> bool:
    """Whether machines may come or go. torchrun then stops the ranks with TERM and starts others,
    which it does not count as a restart."""
    return environ.get("GROUP_WORLD_SIZE") != "1" or len(items(dig(plan, "agents"))) > 1


def _ended(run: rundir.RunDir, environ: Mapping[str, str]) -> int | None:
    """The exit code of a run that is complete or was asked to stop. None: it has failed, or
    torchrun has stopped its ranks because machines come or go, or because a rank was lost before
    the training began."""
    summary, failure = standing.ends(run)
    asked = failure if failure and failure["kind"] == rundir.ASKED else None
    if (end := summary or asked) is None:
        return None
    by_torchrun = end is asked or _may_change(rundir.read_json(run.plan), environ)
    return None if end["exit_code"] == Exit.PREEMPTED and by_torchrun else end["exit_code"]


def agents(agent: StarterRecord, place: Topology) -> list[StarterRecord]:
    """Those of all machines, on rank 0."""
    from training.inspector import distributed

    told = distributed.exchange_texts("agents", json.dumps(agent) if place.local_rank == 0 else "")
    return [json.loads(text) for text in dict.fromkeys(told) if text]
