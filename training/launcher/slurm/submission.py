"""What a job runs, frozen at submission: code, configuration, ranks, environment.

A run directory with a plan that holds only the configuration: each start of the job, the first one
too, resumes that run, so edits of the code or the config file affect none of them. Beside it:

    code/         the project's files
    code.json     revision, ranks, nodes, and every start of the job
    code.env      variables of the job
    code.argv     the command that submits it
    code.step     the command of the ranks, in the job
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from training.config import flags, resolve
from training.config.schema import FIELDS, of_the_run
from training.core import manifest, rundir
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.core.project import ROOT, WORK
from training.core.read_backwards import backwards
from training.launcher.slurm import code_snapshot, log_files, options, requested
from training.plan import init_from
from training.plan.request import Request

if TYPE_CHECKING:
    from training.core.contracts.plan import FrozenPlan
    from training.core.contracts.run_files import ElasticJob, JobRecord

LOG_NAME = "%x_%j.log"  # of the job: name and number


class FrozenJob:
    """Paths of the frozen files; `code` is `<run>/code`, or `<run>/code_2` for a later submission
    of the same run."""

    def __init__(self, code: Path) -> None:
        self.code, self.run = code, rundir.RunDir(code.parent)
        self.record, self.env, self.argv, self.step = (
            code.with_name(code.name + end) for end in (".json", ".env", ".argv", ".step")
        )

    def facts(self) -> JobRecord:
        found = cast("JobRecord | None", rundir.read_json(self.record))
        if found is None:
            raise UserError(
                Problem(
                    "slurm.submission_damaged",
                    msg("core.manifest.damaged", file=self.record),
                    msg("launcher.slurm.prepared"),
                )
            )
        return found

    def files(self) -> list[Path]:
        """All that is of this job alone."""
        new = (rundir.read_json(self.record) or {}).get("new_run")
        if new and not manifest.all_in(self.run.checkpoints):
            return [self.run.path]
        paths = (self.code, self.record, self.env, self.argv, self.step)
        return [path for path in paths if path.exists()]

    def withdraw(self) -> None:
        """Remove the files of a job that was not submitted."""
        for path in self.files():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def freeze(
    request: Request,
    line: options.SplitArgs,
    nodes: int,
    ranks: int,
    job: str | None,
    environ: Mapping[str, str],
) -> FrozenJob:
    """Make the run directory (or use that of the run to resume) with all frozen files. `job`: the
    ID of this job, None before submission."""
    from training.plan import writer

    run = request.resume_from or writer.new_run(request)
    frozen = FrozenJob(_new_code(run))
    try:
        _write(frozen, request, line, nodes, ranks, job, environ)
    except BaseException:
        if not request.resume_from:
            shutil.rmtree(run.path)
        raise
    return frozen


def earlier_jobs(run: rundir.RunDir) -> dict[str, str]:
    """Job → its cluster, "" for the default one: of the newest submission, which may wait in the
    queue, and of those that have begun."""
    submitted = (one for one in backwards(run.events) if one.get("event") == "submitted")
    begun = (rundir.read_json(path) or {} for path in run.path.glob("code*.json"))
    found = [next(submitted, {}), *begun]
    return {str(one["job"]): str(one.get("cluster") or "") for one in found if one.get("job")}


def _new_code(run: rundir.RunDir) -> Path:
    names = ("code" if n == 1 else f"code_{n}" for n in range(1, 1000))
    return next(run.path / name for name in names if not (run.path / name).exists())


def _write(
    frozen: FrozenJob,
    request: Request,
    line: options.SplitArgs,
    nodes: int,
    ranks: int,
    job: str | None,
    environ: Mapping[str, str],
) -> None:
    run = frozen.run
    results = (request.experiments, request.logs)
    code = code_snapshot.take(ROOT, frozen.code, without=results)
    (WORK / "data").mkdir(exist_ok=True)
    (frozen.code / "data").symlink_to(WORK / "data")  # texts that are already prepared
    request.logs.mkdir(parents=True, exist_ok=True)
    log_files.make_folders(line)
    task, linked = _frozen_task(frozen, request.kind.file), list[str]()
    if task and task.is_relative_to(frozen.code):
        folder = task.parent.relative_to(frozen.code)
        linked = code_snapshot.link_rest(ROOT, frozen.code, folder, results)
    if not request.resume_from:
        rundir.write_json(run.plan, _plan(frozen, request, line, nodes * ranks, task))
    variables = [f"{name}={value}" for name, value in _environment(environ).items()]
    rundir.write_words(frozen.env, variables)
    rundir.write_words(frozen.argv, sbatch(frozen, request, line, nodes, ranks))
    facts: JobRecord = {
        "created": time.time(),
        "name": run.name if _in_default_folder(request, run) else str(run.path),
        "typed": line.typed if job is None else requested.of_this_job(nodes, ranks, environ),
        "again": [] if request.origins["log_dir"] == "default" else [f"--log_dir={request.logs}"],
        "code": code.record(),
        "new_run": not request.resume_from,
        "nodes": nodes,
        "ranks_per_node": ranks,
        "elastic": elastic(request, nodes, ranks, job is None and options.KILL not in line.sbatch),
        "flags": _flags(request, line, task, environ),
        "linked": linked,
        "live_task": str(request.kind.file) if request.kind.file and task is None else None,
        "out_dir": str(request.experiments),
        "log_dir": str(request.logs),
        "job": job,
        "starts": [],
    }
    rundir.write_json(frozen.record, facts)  # written last: it marks the submission as complete


def _in_default_folder(request: Request, run: rundir.RunDir) -> bool:
    """A run that is resumed by its path may be elsewhere."""
    inside = run.path.parent.resolve() == request.experiments.resolve()
    return inside and request.origins["out_dir"] == "default"


def _frozen_task(frozen: FrozenJob, file: Path | None) -> Path | None:
    """The copy of the user's task file, beside the copies of its modules; None if it is not in the
    project."""
    if file is None:
        return None
    # A run of an earlier submission has the path in the code frozen then.
    earlier = [path for path in frozen.run.path.glob("code*") if path.is_dir()]
    for place in (file, file.parent.resolve() / file.name):
        for root in (*earlier, ROOT):
            if place.is_relative_to(root):
                copy = frozen.code / place.relative_to(root)
                # not a link to the file that may be edited
                if copy.is_file() and copy.resolve().is_relative_to(frozen.code.resolve()):
                    return copy
    return file if file.is_relative_to(frozen.run.path) else None


def _plan(
    frozen: FrozenJob, request: Request, line: options.SplitArgs, ranks: int, task: Path | None
) -> FrozenPlan:
    """Configuration of a run that has not been planned: what depends on the machine is added when
    the job starts."""
    kind = replace(request.kind, file=task or request.kind.file)
    plan: FrozenPlan = {
        "created": time.time(),
        "command": {
            "script": options.SCRIPT,
            "args": [*line.typed, *line.training],
            "cwd": os.getcwd(),
        },
        "config_file": request.config_name(),
        "task": kind.record(request.options),
        "config": request.values() | ({"task": str(task)} if task else {}),
        "login_file": request.login_file(),
        "origins": request.origins,
        "ranks": ranks,
        "run_name": frozen.run.name,
        "run_dir": str(frozen.run.path),
        "submission": frozen.code.name,
    }
    if request.start:
        plan["init_from"] = init_from.record(request.start)
    return plan


def _flags(
    request: Request, line: options.SplitArgs, task: Path | None, environ: Mapping[str, str]
) -> list[str]:
    """Flags of each start of the job beside --resume: those that a resumed run does not keep, or is
    to change."""
    fields = request.kind.fields
    chosen: dict[str, object] = {
        n: text
        for n, (text, _) in flags.parse(line.training, fields).flags.items()
        if n in fields and n not in ("resume", "run_name", "out_dir", "log_dir")
    }
    if request.resume_from and (name := resolve.variable_of("init_from", fields, environ)):
        chosen.setdefault("init_from", environ[name])  # _environment() clears it
    if request.start and "init_from" in chosen:
        chosen["init_from"] = request.start.file  # whatever the word means when the job starts
    chosen |= {"task": task} if task else {}
    if not request.resume_from:
        # The job has the variables of the submission, which come before what a resumed run keeps.
        chosen = {n: v for n, v in chosen.items() if resolve.variable_of(n, fields, environ)}
        chosen.pop("init_from", None)
        config = request.config
        launch = [
            n for n in FIELDS if FIELDS[n].metadata["group"] == "launch" and not of_the_run(n)
        ]
        chosen |= {n: getattr(config, n) for n in launch if getattr(config, n) != FIELDS[n].default}
    return [
        f"--{name}={value}"
        for name, value in chosen.items()
        if name not in ("nnodes", "master_addr")
    ]


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of the job: the Python environment of the submission; a local build of PyTorch is
    on its path already. A resume from a checkpoint would refuse other weights."""
    # A Python that is in no environment may not be called "python".
    found = {"VIRTUAL_ENV": sys.prefix, "PYTHON": sys.executable, "DUET_INIT_FROM": ""}
    if environ.get("DUET_PYTHON"):
        found["DUET_PYTHON"] = sys.executable  # also with --export=NONE
    # One that is not used may come first on PATH; with --export=NONE that of the user's profile.
    found["CONDA_PREFIX"] = sys.prefix if environ.get("CONDA_PREFIX") == sys.prefix else ""
    if environ.get("TORCH_LOCAL_PATH"):
        found["TORCH_LOCAL_PATH"] = ""
        found |= {
            name: environ[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if environ.get(name)
        }
    return found


def elastic(request: Request, nodes: int, ranks: int, no_kill: bool = True) -> ElasticJob | None:
    """Whether the run continues without a lost node (training.plan.elastic decides in the job)."""
    config, least = request.config, request.config.min_ranks
    if nodes == 1 or not isinstance(least, int) or least >= nodes * ranks or config.retries == 0:
        return None
    return {"min_ranks": least, "rejoin": config.rejoin, "no_kill": no_kill}


def sbatch(
    frozen: FrozenJob, request: Request, line: options.SplitArgs, nodes: int, ranks: int
) -> list[str]:
    # A percent sign of the path is doubled in SLURM's pattern.
    log = str(request.logs).replace("%", "%%") + f"/{LOG_NAME}"
    defaults = {"job-name": frozen.run.name, "output": log}
    given = [f"--{name}={value}" for name, value in defaults.items() if line.used(name) is None]
    if elastic(request, nodes, ranks):
        given.append(options.NO_KILL)  # before the user's options, which may switch it off
    # SLURM runs a copy of the script, which cannot know where the code is.
    script = [str(frozen.code / options.SCRIPT), f"--frozen={frozen.code}"]
    return ["sbatch", "--parsable", *given, *line.sbatch, *script]
