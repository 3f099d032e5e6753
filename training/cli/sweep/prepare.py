"""Checks of a sweep before anything starts: every run is planned, all problems are reported at
once."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import training
from training.cli.sweep import grid, naming
from training.cli.sweep.expected import Expected
from training.cli.sweep.fixes import Collected, label
from training.cli.sweep.grid import Combination
from training.cli.sweep.options import SweepOptions
from training.cli.sweep.slots import Slot, gpu_slots, jobs
from training.config import flags
from training.config.origin import VARIABLE, Origin
from training.config.schema import FIELDS, of_the_run
from training.core import sweep_dir
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.project import LAUNCH_SCRIPT
from training.core.sweep_dir import COMMAND, SweepDir
from training.host import gpus
from training.host.placement import LOCAL
from training.plan import training_plan
from training.plan.cli_args import QUICKSTART
from training.plan.request import Request, read
from training.plan.script_words import asked_for

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.plan import Plan
    from training.core.contracts.run_files import SweepRecord

Values = TypeVar("Values")
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
    slots, plans = _plans(requests, runs, labels, options, environ)
    record: SweepRecord = {
        "schema_version": sweep_dir.VERSION,
        "duet_version": training.__version__,
        "created": time.time(),
        "command": argv,
        "cwd": os.getcwd(),
        "ranks": options.gpus_per_run,
        "device": plans[0]["device"]["value"],
        "runs": [
            {"name": "", "args": [*run.args, *_exported(request, environ)], "values": one}
            for request, run, one in _zip(requests, runs, shown)
        ],
    }
    folder, known = naming.find(options.name, record, requests[0], values)
    expected = Expected(requests[0].experiments)
    return Sweep(
        folder,
        known or record,
        slots,
        [expected.seconds(plan) for plan in plans],
        known=known is not None,
    )


def _zip(
    requests: Sequence[Request], runs: Sequence[Combination], values: Sequence[Values]
) -> Iterator[tuple[Request, Combination, Values]]:
    return zip(requests, runs, values, strict=True)


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
            fix = f"./{LAUNCH_SCRIPT} {options.gpus_per_run} {shlex.join(runs[0].args)}"
        what, allowed = msg("cli.sweep.one_run"), msg("cli.sweep.one_run_allowed")
        return [Problem("sweep.one_run", what, allowed, [fix])]
    if len(runs) > grid.ASKED and not (options.yes or options.dry_run):
        again = shlex.join([*own_words(options), *options.rest])
        what = msg("cli.sweep.many", count=len(runs))
        fixes = [f"{COMMAND} {again} --dry_run", f"{COMMAND} {again} --yes"]
        return [Problem("sweep.many", what, msg("cli.sweep.many_allowed"), fixes)]
    return []


def own_words(options: SweepOptions) -> list[str]:
    """The sweep's own options as typed, without actions."""
    words = [f"--list={options.listed}"] if options.listed else []
    words += [f"--name={options.name}"] if options.name else []
    words += [f"--jobs={options.jobs}"] if options.jobs else []
    return words + ([f"--gpus_per_run={options.gpus_per_run}"] if options.gpus_per_run != 1 else [])


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


def _plans(
    requests: Sequence[Request],
    runs: Sequence[Combination],
    labels: Sequence[str],
    options: SweepOptions,
    environ: Mapping[str, str],
) -> tuple[list[Slot], list[Plan]]:
    """The GPUs of the runs side by side, and the plan of each run. The plans are spread over the
    GPUs, so that a GPU without enough free memory is found before anything starts: each run that it
    gets later would fail at once, until none is left."""
    wanted = any(request.config.device != "cpu" for request in requests)
    machine = gpus.inventory_at_start(environ).gpus if wanted else ()
    slots = gpu_slots(machine, options.gpus_per_run)
    plans: list[Plan] = []
    wrong = Collected(len(runs), own_words(options))
    used = slots[: options.jobs or len(slots)] or [Slot()]
    for at, (request, run, name) in enumerate(_zip(requests, runs, labels)):
        visible = used[at % len(used)].visible
        here = {gpus.VISIBLE: visible} if visible else {}
        try:
            plans.append(training_plan.build(replace(request), {**environ, **here})[0])
        except UserError as error:
            wrong.add(error.problems, run, name)
    if found := wrong.problems():
        raise UserError(found, Exit.RESOURCES)
    on_gpus = any(plan["device"]["value"] == "cuda" for plan in plans)
    return jobs(options, slots if on_gpus else [], len(runs)), plans


def resume(options: SweepOptions, environ: Mapping[str, str], experiments: Path) -> Sweep:
    """The sweep of --resume. Raises UserError."""
    folder, record = sweep_dir.find(
        options.resume, experiments, lambda name: sweep_dir.command("resume", name, experiments)
    )
    machine = gpus.inventory_at_start(environ).gpus if record["device"] == "cuda" else ()
    options = replace(options, gpus_per_run=record["ranks"])
    slots = jobs(options, gpu_slots(machine, record["ranks"]), len(record["runs"]))
    return Sweep(folder, record, slots, known=True)
