"""Plan fields common to Duet's own training and user scripts: launcher, ranks, device, environment
variables, port."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import training
from training.core.errors import Exit, UserError
from training.core.messages import msg
from training.core.run_reader import PLAN_VERSION
from training.core.units import plural
from training.host import decisions, env_vars, gpu_choice, hosts, numa, packages
from training.host.gpus import GpuInventory
from training.host.placement import LOCAL, on_one_machine
from training.host.torch_build import TorchBuild
from training.plan import preflight
from training.plan.request import LaunchRequest, Request

if TYPE_CHECKING:
    from training.core.contracts.plan import PlanStart


def start(
    request: LaunchRequest,
    machine: GpuInventory,
    torch: TorchBuild | None,
    device: decisions.Decision,
    environ: Mapping[str, str],
) -> tuple[PlanStart, list[preflight.Check]]:
    """The fields of every plan, with its first two sentences and notes, and the check of the master
    port."""
    config, place, ranks, local = request.config, request.place, request.ranks, request.local_ranks
    port, check = (
        preflight.port(config.master_port) if place.kind == LOCAL else (place.master_port, None)
    )
    launcher = decisions.launcher(config, place, request.script, ranks)
    retries = decisions.retries(config, launcher, request.script)
    ignored = (
        [msg("plan.note.retries", retries=config.retries, reason=retries.reason)]
        if config.retries not in ("auto", retries.value)
        else []
    )
    used = machine.gpus[: request.gpu_ranks] if device.value == "cuda" else ()
    bound = numa.choose(
        config.numa, launcher.value, device.value, used, local, request.origins["numa"]
    )
    chosen = env_vars.choose(
        environ,
        device=device.value,
        ranks=ranks,
        local_ranks=local,
        alone=on_one_machine(place.record()),
        debug=config.debug,
        rendezvous=place.master_addr,
        libuv=config.libuv,
        deterministic=config.deterministic,
        node_threads=bound.threads,
        cores=env_vars.cores_of_ranks(place, environ),
        gpus=used,
        task=isinstance(request, Request) and launcher.value != "env",
        script=not isinstance(request, Request),
    )
    version = torch.version if torch else None
    counted, by, why = plural(ranks, "rank"), launcher.value, launcher.reason
    return {
        "schema_version": PLAN_VERSION,
        "duet_version": training.__version__,
        "created": time.time(),
        "launch": secrets.token_hex(8),
        "torch": version,
        "command": {"script": request.script, "args": request.args, "cwd": os.getcwd()},
        "origins": request.origins,
        "place": place.record(),
        "ranks": ranks,
        "local_ranks": local,
        "launcher": launcher.record(),
        "numa": bound.record(),
        "retries": retries.record(),
        "device": device.record(),
        "gpus": [g.record() for g in used],
        "driver": machine.driver,
        "variables": [v.record() for v in chosen],
        "master_port": port,
        "resume": bool(request.resume_from),
        "notes": [
            *request.notes,
            *decisions.left_over(place),
            *ignored,
            *env_vars.useless(environ),
            *gpu_choice.numbering(machine, environ),
            *_not_installed(request),
        ],
        "headline": [],
        "text": [
            place.sentence(),
            msg("plan.text.ranks", ranks=counted, launcher=by, reason=why)
            if local == ranks
            else msg("plan.text.ranks_each", ranks=counted, local=local, launcher=by, reason=why)
            if place.source == hosts.HEAD
            else msg("plan.text.ranks_here", ranks=counted, local=local, launcher=by, reason=why),
            *(
                [bound.sentence(place.node_rank * local)]
                if device.value == "cuda" or config.numa != numa.AUTO
                else []
            ),
        ],
    }, [check] if check else []


def _not_installed(request: LaunchRequest) -> list[str]:
    """A note on the features that are off because an optional package is not installed, or on the
    installation that the first start makes."""
    if not request.installed:
        return [msg("plan.note.first_start")]
    tracked = request.tracked() if isinstance(request, Request) else []
    wanted = [
        "py-spy",
        "google-re2",
        *(["vl-convert-python"] if request.config.report else []),
        *tracked,
    ]
    text = packages.missing_text(packages.lacking(wanted))
    return [text] if text else []


def refuse_errors(request: LaunchRequest, checks: list[preflight.Check]) -> None:
    """Raises UserError (exit 3) for failed checks; --dry_run and --check show them in the report
    instead. The first rank of a machine reports what all its ranks see."""
    failed = [c for c in checks if c.status == preflight.ERROR]
    if failed and not (request.dry_run or request.check):
        alike = request.gpu_ranks == request.local_ranks  # otherwise each rank sees its own GPU
        own = [c for c in failed if not (alike or c.name in preflight.OF_MACHINE)]
        first = request.place.local_rank == 0
        problems = [c.problem() for c in (failed if first or not own else own)]
        raise UserError(problems, Exit.RESOURCES, said_by_another=not (first or own))


def warnings(checks: list[preflight.Check]) -> list[str]:
    return [c.line for c in checks if c.status == preflight.WARNING]
