"""Checks of a sweep before anything starts: every run is planned, all problems are reported at
once."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import training
from training.cli.sweep import config_files, grid, naming
from training.cli.sweep.expected import Expected
from training.cli.sweep.fixes import Collected, label
from training.cli.sweep.grid import Combination
from training.cli.sweep.options import SweepOptions, own_words
from training.cli.sweep.planned import plan
from training.cli.sweep.slots import Slot, emptiest, gpu_slots, jobs
from training.config import flags
from training.config.origin import VARIABLE, Origin
from training.config.schema import FIELDS, of_the_run
from training.core import run_reader, standing, sweep_dir
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.project import LAUNCH_SCRIPT
from training.core.sweep_dir import COMMAND, SweepDir
from training.core.units import plural
from training.host import gpus
from training.host.placement import LOCAL
from training.plan import preflight
from training.plan.cli_args import QUICKSTART
from training.plan.request import Request, read
from training.plan.script_words import asked_for

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.run_files import SweepRecord

# Each run has its own: set by the sweep, or without meaning for several runs.
REFUSED = {
    *("run_name", "resume", "master_port", "node_rank", "nnodes", "hosts", "hostfile"),
    *("save_config", "dry_run", "check", "json", "explain"),
    *("script", "module", "no_python", "watch"),
}
INSTEAD = {"run_name": "--name=NAME", "resume": "--resume=NAME"}
FOLDERS = ("out_dir", "log_dir")
OWN_VARIABLES = ("DUET_RUN_NAME", "DUET_RESUME")


@dataclass
class Sweep:
    """A checked sweep. `slots`: one for each of the runs side by side; `expected_s`: of each run,
    None: unknown."""

    folder: SweepDir
    record: SweepRecord
    slots: list[Slot]
    expected_s: list[float | None] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # of the plans
    known: bool = False  # continues a sweep

    @property
    def jobs(self) -> int:
        return len(self.slots)


def prepare(options: SweepOptions, argv: list[str], environ: Mapping[str, str]) -> Sweep:
    """Raises UserError with all problems."""
    problems = [*options.problems, *_refused(options.rest), *naming.wrong(options.name)]
    if any(problem.code == "sweep.refused_flag" for problem in problems):
        raise UserError(problems)
    runs = grid.combinations(options.rest, options.listed, environ, problems)
    refused = [problem for run in runs for problem in _refused(run.args)]  # of --list
    problems += [one for at, one in enumerate(refused) if one not in refused[:at]]
    if refused or not runs:
        raise UserError(problems)
    if not problems:
        problems += _number(runs, options)
    values = grid.differing(runs)
    labels = [label(one) for one in values]
    environ = {name: text for name, text in environ.items() if name not in OWN_VARIABLES}
    try:
        requests = _requests(runs, labels, options, environ)
    except UserError as error:
        reported = {problem.what for problem in problems}
        problems += [problem for problem in error.problems if problem.what not in reported]
    if problems:
        raise UserError(problems)
    _same_folder(requests)
    shown = [_resolved(request, one) for request, one in zip(requests, values, strict=True)]
    planned = plan(requests, runs, labels, options, environ)
    devices = [one["device"]["value"] for one in planned.plans]
    record: SweepRecord = {
        "schema_version": sweep_dir.VERSION,
        "duet_version": training.__version__,
        "created": time.time(),
        "command": argv,
        "cwd": os.getcwd(),
        "ranks": options.gpus_per_run,
        "device": "cuda" if "cuda" in devices else "cpu",
        "runs": [
            {
                "name": "",
                "args": [*run.args, *_exported(request, environ)],
                "values": one,
                "device": device,
                "config_sha256": config_files.digest(request.config_file),
                "init_from": str(request.start.file.absolute()) if request.start else "",
            }
            for request, run, one, device in zip(requests, runs, shown, devices, strict=True)
        ],
    }
    folder, known = naming.find(options.name, record, requests[0], values)
    if known:
        _require_gpus(known, planned.slots, planned.machine)
    elif len(runs) > len(planned.slots):
        planned.warnings += _replaced(requests)
    expected = Expected(requests[0].experiments)
    return Sweep(
        folder,
        known or record,
        planned.slots,
        [expected.seconds(one) for one in planned.plans],
        planned.warnings,
        known=known is not None,
    )


def _replaced(requests: Sequence[Request]) -> list[str]:
    """Warnings: weights that their run, which is trained now, may delete before all have begun."""
    names = list[str]()
    for run in [request.start.run for request in requests if request.start]:
        supervisor = run_reader.read_supervisor(run.supervisor) if run else None
        ended = run and any(standing.ends(run))
        if run and supervisor and not ended and standing.is_active(run, supervisor):
            names.append(run.name)
    return [msg("cli.sweep.weights_replaced", name=name) for name in dict.fromkeys(names)]


def _exported(request: Request, environ: Mapping[str, str]) -> list[str]:
    """The variables that configure a run, as flags: the process that resumes the sweep may lack
    them."""
    return [
        f"--{name}={environ[origin.name]}"
        for name, origin in request.origins.items()
        if isinstance(origin, Origin)
        and origin.source == VARIABLE
        and (name in FOLDERS or name not in FIELDS or of_the_run(name))
    ]


def _refused(words: list[str]) -> list[Problem]:
    if asked_for(words):
        what = msg("cli.sweep.refused", typed="--script")
        return [Problem("sweep.refused_flag", what, msg("cli.sweep.refused_allowed"))]
    line = flags.parse(words)
    return [
        Problem(
            "sweep.refused_flag",
            msg("cli.sweep.refused", typed=typed),
            msg("cli.sweep.refused_allowed"),
            [f"{COMMAND} … {INSTEAD[name]}"] if name in INSTEAD else [],
            name,
        )
        for name, (_, typed) in line.flags.items()
        if name in REFUSED
    ]


def _number(runs: Sequence[Combination], options: SweepOptions) -> list[Problem]:
    """Too few or many runs."""
    if len(runs) == 1 and not flags.parse(runs[0].args).unknown:
        fix = f"{COMMAND} {QUICKSTART} --matrix_lr=0.01,0.02"
        if runs[0].args:
            words = [*runs[0].args, *(["--dry_run"] if options.dry_run else [])]
            fix = f"./{LAUNCH_SCRIPT} {options.gpus_per_run} {shlex.join(words)}"
        what, allowed = msg("cli.sweep.one_run"), msg("cli.sweep.one_run_allowed")
        return [Problem("sweep.one_run", what, allowed, [fix])]
    if len(runs) > grid.ASKED and not (options.yes or options.dry_run):
        again = shlex.join([*own_words(options), *options.rest])
        what = msg("cli.sweep.many", count=len(runs))
        fixes = [f"{COMMAND} {again} --dry_run", f"{COMMAND} {again} --yes"]
        return [Problem("sweep.many", what, msg("cli.sweep.many_allowed"), fixes)]
    return []


def _requests(
    runs: Sequence[Combination],
    labels: Sequence[str],
    options: SweepOptions,
    environ: Mapping[str, str],
) -> list[Request]:
    """The checked request of each run; problems that do not depend on the machine."""
    out, wrong = list[Request](), Collected(len(runs), own_words(options))
    for run, name in zip(runs, labels, strict=True):
        try:
            request = read(LAUNCH_SCRIPT, [str(options.gpus_per_run), *run.args], environ)
        except UserError as error:
            wrong.add(error.problems, run, name)
            continue
        if request.place.kind != LOCAL:
            what = msg("cli.sweep.place", reason=request.place.reason)
            wrong.add([Problem("sweep.place", what, msg("cli.sweep.place_allowed"))], run, name)
        out.append(request)
    found = wrong.problems() + (_twice(out, labels, runs) if len(out) == len(runs) else [])
    if found:
        raise UserError(found)
    return out


def _twice(
    requests: Sequence[Request], labels: Sequence[str], runs: Sequence[Combination]
) -> list[Problem]:
    """Runs with the same configuration, however it was typed."""
    first, problems = dict[str, int](), list[Problem]()
    for at, request in enumerate(requests):
        key = repr((sorted((request.values() | request.options).items()), request.config_file))
        if (before := first.setdefault(key, at)) != at:
            what = msg(
                "cli.sweep.twice",
                number=at + 1,
                before=before + 1,
                values=labels[at]
                or labels[before]
                or label(runs[at].chosen())
                or shlex.join(runs[at].words),
            )
            problems.append(Problem("sweep.duplicate", what, msg("cli.sweep.twice_allowed")))
    return problems


def _same_folder(requests: Sequence[Request]) -> None:
    if len({request.experiments for request in requests}) > 1:
        what = msg("cli.sweep.folders")
        raise UserError(Problem("sweep.refused_flag", what, msg("cli.sweep.one_folder")))


def _resolved(request: Request, typed: Mapping[str, str]) -> FieldValues:
    """The values in which the runs differ; of a flag that this run lacks, its default too."""
    known = request.values() | request.options
    known |= {"config": request.config_file.stem if request.config_file else ""}
    return {name: known.get(name, text) for name, text in typed.items()}


def resume(options: SweepOptions, environ: Mapping[str, str], experiments: Path) -> Sweep:
    """The sweep of --resume. Raises UserError."""
    folder, record = sweep_dir.find(
        options.resume, experiments, lambda name: sweep_dir.command("resume", name, experiments)
    )
    record["cwd"] = config_files.folder(record, folder.experiments)
    options, runs = replace(options, gpus_per_run=record["ranks"]), len(record["runs"])
    wanted = record["device"] == "cuda"
    machine = emptiest(options, runs, environ) if wanted else gpus.GpuInventory((), "")
    slots = jobs(options, gpu_slots(machine.gpus, record["ranks"]), runs)
    _require_gpus(record, slots, machine)
    return Sweep(folder, record, slots, known=True)


def _require_gpus(record: SweepRecord, slots: Sequence[Slot], machine: gpus.GpuInventory) -> None:
    """Runs that were planned on GPUs are not trained on the CPU. Raises UserError."""
    if record["device"] == "cuda" and not any(slot.indices for slot in slots):
        text = msg(
            "plan.gpus.too_few",
            needed=plural(record["ranks"], "GPU is", "GPUs are"),
            have=len(machine.gpus),
            reason=machine.reason,
        )
        check = preflight.Check("GPUs", preflight.ERROR, text, ["nvidia-smi"])
        raise UserError(check.problem(), Exit.RESOURCES)
