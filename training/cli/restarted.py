"""A rank that torchrun has started again (`--max-restarts`, or with other machines): it resumes the
run that the same torchrun began."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

from training.config.resolve import RESTARTED
from training.core import find_run, log, rundir, standing
from training.core.errors import UserError
from training.core.jsonl import dig, items
from training.core.messages import msg
from training.host.placement import Topology
from training.plan import cli_args

if TYPE_CHECKING:
    from training.core.contracts.plan import StarterRecord

RESUME = "DUET_RESUME"
NEWEST = 20  # runs: others may have begun since then


def agent(environ: Mapping[str, str], parent: int) -> StarterRecord | None:
    """The process of torchrun on this machine, which outlives the ranks; None without torchrun."""
    return standing.identity(parent) if "TORCHELASTIC_RUN_ID" in environ else None


def resume(
    script: str, args: list[str], environ: MutableMapping[str, str], agent: StarterRecord
) -> None:
    """Set the variables for the run of the attempt before, unless the user names one."""
    try:
        asked = cli_args.parse_args(script, args, environ)
    except UserError:  # reported with all other problems
        return
    run = None if asked.resolved.config.resume else _begun(asked.experiments, args, agent)
    if run:
        environ.update({RESUME: str(run.path), RESTARTED: "1"})
        if environ.get("RANK") == "0":
            log.warning(msg("cli.restarted.resumes", name=run.name))


def _begun(experiments: Path, args: list[str], agent: StarterRecord) -> rundir.RunDir | None:
    """The newest run of the same command that this torchrun has begun and that is not complete."""
    for _, path in sorted(find_run.planned(experiments), reverse=True)[:NEWEST]:
        run = rundir.RunDir(path)
        plan = rundir.read_json(run.plan)
        if agent in items(dig(plan, "agents")) and dig(plan, "command", "args") == args:
            summary, _ = standing.ends(run)
            return None if summary and summary["status"] == "done" else run
    return None


def agents(agent: StarterRecord, place: Topology) -> list[StarterRecord]:
    """Those of all machines, on rank 0."""
    from training.inspector import distributed

    told = distributed.exchange_texts("agents", json.dumps(agent) if place.local_rank == 0 else "")
    return [json.loads(text) for text in dict.fromkeys(told) if text]
