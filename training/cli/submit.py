"""Steps of a SLURM job, for lib/slurm.sh and lib/batch.sh:
`python lib/run_module.py training.cli.submit STEP`

check ARGS…              check the command line, with any Python; writes nothing
submit ARGS…             check and freeze; prints the folder of the frozen code
submitted CODE JOB       print how to watch and cancel the job, `NUMBER` or `NUMBER;CLUSTER`
withdraw CODE            clean up if sbatch has submitted no job; prints the one it has submitted
freeze ARGS…             in a job of plain sbatch: like submit
begin CODE               in a job: write the command of its step to CODE.step
nodes CODE               in a job with --min_ranks: that step, which runs one step for each node
node CODE FIRST ADDRESS PORT COMMAND…  on its other nodes: run this launch command
end CODE STATUS STOPPED  after the step: exit with the status of the job
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from training.config import origin
from training.core import log as console
from training.core import rundir
from training.core.errors import Exit, NothingToDo, Problem, UserError
from training.core.messages import msg
from training.core.project import typed
from training.core.units import plural
from training.host import program
from training.launcher.slurm import (
    code_snapshot,
    controller,
    job,
    job_request,
    node_steps,
    options,
    requested,
    submission,
)
from training.launcher.slurm.submission import FrozenJob
from training.plan.request import Request

NO_SBATCH = Problem(
    "slurm.no_sbatch",
    msg("cli.submit.no_sbatch"),
    msg("cli.submit.login_node"),
    ["./launch_train.sh N CONFIG"],
)


def _dry_run(request: Request, line: options.SplitArgs, nodes: int, ranks: int, code: Path) -> str:
    """The output of --dry_run."""
    frozen, split, values = FrozenJob(code), request.batch, request.values() | request.options
    width = max(map(len, values))
    size = msg("cli.submit.size", nodes=plural(nodes, "node"), ranks=plural(ranks, "rank"))
    if split:
        size = msg("cli.submit.size_batch", size=size, sentence=split.sentence(request.kind.unit))
    elastic, survives = submission.elastic(request, nodes, ranks), []
    if elastic and options.KILL not in line.sbatch:
        least = plural(elastic["min_ranks"], "rank")
        survives = [f"  {msg('launcher.slurm.elastic', ranks=least)}"]
    saved = request.save_config
    return "\n".join(
        [
            msg("cli.submit.dry_run_saved", path=saved) if saved else msg("cli.submit.dry_run"),
            "",
            f"  {shlex.join(submission.sbatch(frozen, request, line, nodes, ranks))}",
            f"  {size}",
            *survives,
            "",
            msg("cli.submit.configuration"),
            *(
                f"  {n:<{width}}  {value!r:<14}  {origin.shown(request.origins[n])}"
                for n, value in values.items()
            ),
        ]
    )


def _check(args: list[str]) -> int:
    """Checks before the installation. Prints nothing if the packages are needed."""
    request, line, nodes, ranks = job_request.typed(args, os.environ, installed=False)
    if request.dry_run:
        if not request.save_config:  # which needs the packages
            print(_dry_run(request, line, nodes, ranks, _code(request)))
    elif shutil.which("sbatch") is None and "SLURM_JOB_ID" not in os.environ:
        raise UserError(NO_SBATCH, Exit.RESOURCES)
    return Exit.DONE


def _code(request: Request) -> Path:
    name = request.resume_from.name if request.resume_from else request.config.run_name or "RUN"
    return request.experiments / name / "code"


def _freeze(args: list[str], job_id: str | None) -> int:
    request, line, nodes, ranks = (job_request.typed if job_id is None else job_request.inside)(
        args, os.environ
    )
    if request.save_config:
        request.save()
        if not request.dry_run:
            return Exit.DONE
    if request.dry_run:
        print(_dry_run(request, line, nodes, ranks, _code(request)))
        return Exit.DONE
    if job_id is None and shutil.which("sbatch") is None:
        raise UserError(NO_SBATCH, Exit.RESOURCES)
    frozen = submission.freeze(request, line, nodes, ranks, job_id, os.environ)
    facts = frozen.facts()
    linked = facts.get("linked", [])
    limit = f"{code_snapshot.LARGEST_UNTRACKED >> 20} MiB"
    if left_out := [name for name in facts["code"]["left_out"] if name not in linked]:
        console.warning(msg("cli.submit.not_copied", limit=limit, files=", ".join(left_out[:5])))
    if folders := {n: c for n, c in facts["code"].get("folders", {}).items() if n not in linked}:
        shown = [f"{name}/ ({plural(count, 'file')})" for name, count in folders.items()]
        most, size = code_snapshot.MOST_IN_FOLDER, f"{code_snapshot.LARGEST_FOLDER >> 20} MiB"
        text = msg("cli.submit.folders", most=most, size=size, folders=", ".join(shown[:5]))
        console.warning(text)
    if linked:
        console.warning(msg("cli.submit.linked", limit=limit, files=", ".join(linked[:5])))
    if task := facts.get("live_task"):
        console.warning(msg("cli.submit.live_task", file=task))
    if job_id is None and request.resume_from and line.used("dependency") is None:
        _warn_of_job(frozen.run)
    program.answer(frozen.code)
    return Exit.DONE


def _warn_of_job(run: rundir.RunDir) -> None:
    """Two jobs must not train the same run."""
    for number, cluster in submission.earlier_jobs(run).items():
        state = job.state_elsewhere(number, cluster)
        if not (state in (job.UNKNOWN, job.FORGOTTEN) or job.is_over(state)):
            console.warning(msg("cli.submit.other_job", job=number, state=state, run=run.name))
            return


def _submitted(frozen: FrozenJob, answer: str) -> None:
    facts = frozen.facts()
    number, _, cluster = answer.partition(";")
    on_cluster = ["-M", cluster] if cluster else []  # not the one that commands use by default
    shown = controller.ask(*on_cluster, "show", "job", number).out
    found = re.search(r"^ *StdOut=(.*)$", shown, re.MULTILINE)
    log = found[1] if found else f"{facts['log_dir']}/…_{number}.log"
    frozen.run.event("submitted", job=number, cluster=cluster)
    nodes, ranks = facts["nodes"], facts["ranks_per_node"]
    run = shlex.quote(facts["name"])
    task = facts.get("live_task")
    promise = msg("cli.submit.frozen_without", file=task) if task else msg("cli.submit.frozen")
    console.success(
        msg(
            "cli.submit.submitted",
            number=number,
            cluster="".join(f" {shlex.quote(word)}" for word in on_cluster),
            nodes=plural(nodes, "node"),
            ranks=plural(ranks, "rank"),
            path=frozen.run.path,
            code=facts["code"]["sentence"],
            frozen=promise,
            log=log,
            monitor=typed("./monitor_training.sh"),
            run=run,
            log_quoted=shlex.quote(log),
        )
    )


def _withdraw(frozen: FrozenJob) -> int:
    """sbatch has not printed a number. slurmctld may have the job: sbatch waits only some seconds
    for its answer, and the site's own sbatch may drop --parsable."""
    job = controller.queued(frozen.code / options.SCRIPT, _cluster_options(frozen))
    if job is None:
        remove = " ".join(shlex.quote(str(path)) for path in frozen.files())
        console.error(
            msg(
                "cli.submit.maybe_submitted",
                path=frozen.run.path,
                code=int(Exit.RESOURCES),
                remove=remove,
            )
        )
        return Exit.RESOURCES
    if job := job or frozen.facts()["job"]:  # one that has begun, and ended by now
        print(job)
    else:
        frozen.withdraw()
    return Exit.DONE


def _cluster_options(frozen: FrozenJob) -> list[str]:
    """For squeue, which reads only SLURM_CLUSTERS itself, sbatch the other places too."""
    words = frozen.argv.read_text(encoding="utf-8", errors="surrogateescape").split("\0")
    on = [word for word in words if word.partition("=")[0] in ("--clusters", "--cluster")]
    if on or "SLURM_CLUSTERS" in os.environ:
        return on
    header = requested.header(frozen.code / options.SCRIPT)
    name = os.environ.get("SBATCH_CLUSTERS") or header.get("clusters") or header.get("cluster")
    return [f"--clusters={name}"] if name else []


def main(argv: list[str]) -> int:
    what, *rest = argv
    try:
        if what == "check":
            return _check(rest)
        elif what == "submit":
            return _freeze(rest, None)
        elif what == "freeze":
            return _freeze(rest, os.environ["SLURM_JOB_ID"])
        elif what == "submitted":
            _submitted(FrozenJob(Path(rest[0])), rest[1])
        elif what == "withdraw":
            return _withdraw(FrozenJob(Path(rest[0])))
        elif what == "begin":
            frozen = FrozenJob(Path(rest[0]))
            rundir.write_words(frozen.step, job.begin(frozen, os.environ))
        elif what == "nodes":
            return node_steps.run(FrozenJob(Path(rest[0])), os.environ)
        elif what == "node":
            code, first, host, port, *launch = rest
            address = (host, int(port))
            return node_steps.other_node(FrozenJob(Path(code)), first, address, launch, os.environ)
        elif what == "end":
            return job.end(FrozenJob(Path(rest[0])), int(rest[1]), bool(int(rest[2])), os.environ)
        else:
            raise UserError(
                Problem(
                    "command.unknown",
                    msg("cli.submit.unknown_command", what=what),
                    "check, submit, freeze, begin, nodes, node, end",
                    ["./submit_job.sh --help"],
                )
            )
    except NothingToDo as done:
        console.success(typed(str(done)))
    except UserError as error:
        console.report(
            error,
            msg("cli.submit.nothing_submitted")
            if what in ("check", "submit")
            else msg("core.log.nothing_launched"),
        )
        return int(error.code)
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__, internal=True))
