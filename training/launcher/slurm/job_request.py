"""What a job is to run, from the command line of submit_job.sh, before anything is frozen."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from training.config.resolve import PREFIX
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.core.project import LAUNCH_SCRIPT, ROOT
from training.core.units import plural
from training.host import topology
from training.launcher.slurm import log_files, options, requested
from training.plan.cli_args import QUICKSTART, command, config_not_given
from training.plan.request import Request, read


def check(
    line: options.SplitArgs,
    nodes: int,
    ranks: int,
    environ: Mapping[str, str],
    installed: bool = True,
) -> Request:
    """The request of the whole job. Raises UserError with the problems of both parts of the command
    line."""
    several = [f"--nnodes={nodes}", "--master_addr=first-node"] if nodes > 1 else []
    front = [str(ranks or 1), *several]
    try:
        words = [*front, *line.training]
        request = read(LAUNCH_SCRIPT, words, outside(environ), installed, here=False)
    except UserError as error:
        # The division of the batch is unknown without a number of ranks.
        known = [p for p in error.problems if (ranks and nodes) or p.code != "batch.not_divisible"]
        typed = command(LAUNCH_SCRIPT, front), command(options.SCRIPT, line.typed)
        helps = f"./{LAUNCH_SCRIPT} --help", f"./{options.SCRIPT} --help"
        problems = [
            Problem(
                p.code,
                p.what,
                p.allowed,
                [fix.replace(*typed, 1).replace(*helps) for fix in p.fixes],
            )
            for p in known
        ]
        raise UserError([*line.problems, *problems], error.code) from None
    if line.problems:
        raise UserError(line.problems)
    return request


def outside(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables of an outer allocation or launcher: the job gets its
    own."""
    return {
        name: value
        for name, value in topology.clean(environ).items()
        if not name.startswith("SLURM_")
    }


def typed(
    args: list[str], environ: Mapping[str, str], installed: bool = True
) -> tuple[Request, options.SplitArgs, int, int]:
    """(request, command line, nodes, ranks on each) as typed by hand, checked. Raises UserError."""
    line, script = options.split(args), ROOT / options.SCRIPT
    line.beside = requested.beside(script, environ)
    line.problems += [*requested.problems(line, environ), *log_files.problems(line)]
    nodes, ranks = requested.nodes(line, script), requested.ranks(line, script, environ)
    if not ranks:
        line.problems.append(_no_ranks(line, msg("launcher.slurm.gres_no_gpus")))
    if not line.training and not any(environ.get(f"{PREFIX}{n}") for n in ("RESUME", "TASK")):
        fix = command(options.SCRIPT, [*line.typed, QUICKSTART])
        line.problems.append(config_not_given(fix))
    request = check(line, nodes, ranks, environ, installed)
    gpus = requested.gpus(line, script, environ)
    gres, per_node = (requested.given(line, name, environ) for name in requested.GPUS)
    on_cpus = request.config.device == "cpu" and per_node is None
    if gres is None and on_cpus and not line.ranks:
        raise UserError(
            _no_ranks(line, msg("launcher.slurm.device_cpu", origin=request.origins["device"]))
        )
    by_node = "gpus-per-node" in requested.header(script)
    if request.config.device != "cpu" and 0 < gpus < ranks:
        option = "--gres=gpu:" if per_node is None and not by_node else "--gpus-per-node="
        raise UserError(_few_gpus(gpus, ranks, f"{option}{ranks}"))
    # SLURM would add the GPUs of the script's header, or of a variable.
    typed_by_node = line.option("gpus-per-node") is not None and line.option("gres") is None
    added = gres is None or (typed_by_node and requested.gpus_in_gres(gres) > 0)
    if added and (on_cpus or per_node is not None or by_node):
        line.sbatch.append(options.NO_GRES)
    if by_node and per_node is None and (on_cpus or gres is not None):
        if gres and requested.gpus_in_gres(gres):
            raise UserError(_gpus_twice(gres))
        line.sbatch.append(options.NO_GPUS_PER_NODE)
    return request, line, nodes, ranks


def _few_gpus(gpus: int, ranks: int, more: str) -> Problem:
    what = msg("launcher.slurm.few_gpus", gpus=plural(gpus, "GPU"), ranks=plural(ranks, "rank"))
    unmanaged = f"{options.NO_GRES}   # {msg('launcher.slurm.no_gpu_resources')}"
    return Problem("slurm.few_gpus", what, "", [more, unmanaged])


def _gpus_twice(gres: str) -> Problem:
    what = msg("launcher.slurm.gpus_twice", gres=gres, script=options.SCRIPT)
    gpus = [part.partition(":")[2] or "1" for part in gres.split(",") if part.startswith("gpu")]
    return Problem("slurm.gpus_twice", what, "", [f"--gpus-per-node={','.join(gpus)}"])


def _no_ranks(line: options.SplitArgs, why: str) -> Problem:
    fixes = [command(options.SCRIPT, ["--ranks_per_node=2", *line.typed, *line.training])]
    return Problem(
        "slurm.no_ranks",
        msg("launcher.slurm.no_ranks", why=why),
        msg("launcher.slurm.ranks_or_gpus"),
        fixes,
    )


def inside(
    args: list[str], environ: Mapping[str, str]
) -> tuple[Request, options.SplitArgs, int, int]:
    """The same for a job submitted by `sbatch submit_job.sh`, whose allocation is fixed. Raises
    UserError."""
    line = options.split(args)
    if "SLURM_ARRAY_TASK_ID" in environ:
        # A requeue of one task, by the number of its job, would restart all of them.
        what = msg("launcher.slurm.array", job=environ["SLURM_ARRAY_JOB_ID"])
        fix = command(options.SCRIPT, [*line.typed, *line.training, "--run_name=NAME"])
        line.problems.append(Problem("slurm.array", what, options.REFUSED["array"], [fix]))
    if line.sbatch:
        shown = shlex.join(line.sbatch)
        fix = shlex.join(["sbatch", *line.sbatch, options.SCRIPT, *line.training])
        line.problems.append(
            Problem(
                "slurm.late_argument",
                msg("launcher.slurm.late", shown=shown, script=options.SCRIPT),
                "",
                [fix],
            )
        )
    nodes, ranks = int(environ["SLURM_JOB_NUM_NODES"]), requested.ranks_in_job(line, environ)
    if not ranks:
        tail = shlex.join(line.training or [QUICKSTART])
        fixes = [
            f"sbatch --gres=gpu:2 {options.SCRIPT} {tail}",
            f"sbatch {options.NO_GRES} {options.SCRIPT} --ranks_per_node=2 --device=cpu {tail}",
        ]
        what = msg("launcher.slurm.no_gpus")
        line.problems.append(
            Problem("slurm.no_ranks", what, msg("launcher.slurm.gpus_or_ranks"), fixes)
        )
    return check(line, nodes, ranks, environ), line, nodes, ranks
