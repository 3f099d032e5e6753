"""One start of a SLURM job: the command of its step, and what follows from its end."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from training.core import cause_ids, log, manifest, rundir
from training.core.errors import EXIT_MEANING, Exit
from training.core.failure_kinds import GONE, SILENT
from training.core.jsonl import Record
from training.core.messages import msg
from training.core.next_command import submit_command
from training.core.project import LAUNCH_SCRIPT, ROOT
from training.core.units import plural
from training.launcher.hosts.conductor import TOGETHER_S
from training.launcher.slurm import controller, options
from training.launcher.slurm.submission import FrozenJob

if TYPE_CHECKING:
    from training.core.contracts.run_files import JobStart

LAST_NODE_S = int(TOGETHER_S)  # between the end of the first supervisor and the last
# of srun; the one task starts all ranks: it must not be bound to the core of one task
STEP = ("--cpu-bind=none", "--export=ALL")
RUNNING, UNKNOWN = "RUNNING", "unknown"  # states of a job; the second one without an answer
FORGOTTEN = "forgotten"  # ended longer than MinJobAge ago (300 s by default)
FROM_SIGNAL = 128  # added by a shell, and srun, to the number of the signal that ended a process


def begin(frozen: FrozenJob, environ: Mapping[str, str]) -> list[str]:
    """Log and record the start; the command of the job's only step: one task on each node, which
    starts the ranks there."""
    facts, job = frozen.facts(), environ["SLURM_JOB_ID"]
    nodes, ranks = int(environ["SLURM_JOB_NUM_NODES"]), facts["ranks_per_node"]
    count = int(environ.get("SLURM_RESTART_COUNT", "0")) + 1
    facts["starts"].append(
        {
            "job": job,
            "start": count,
            "time": time.time(),
            "step": saved_step(frozen.run),
            "nodes": nodes,
        }
    )
    facts |= {"job": job, "cluster": environ.get("SLURM_CLUSTER_NAME", "")}
    rundir.write_json(frozen.record, facts)
    names = environ.get("SLURM_JOB_NODELIST", "")
    again = msg("launcher.slurm.again", count=count) if count > 1 else ""
    log.info(
        msg(
            "launcher.slurm.begin_several",
            job=job,
            again=again,
            ranks=plural(ranks, "rank"),
            nodes=nodes,
            names=names,
        )
        if nodes > 1
        else msg(
            "launcher.slurm.begin", job=job, again=again, ranks=plural(ranks, "rank"), names=names
        )
    )
    log.info(
        msg("launcher.slurm.code.frozen", sentence=facts["code"]["sentence"], code=frozen.code)
    )
    cores = environ.get("SLURM_CPUS_ON_NODE", "")
    if cores.isdecimal() and int(cores) < ranks:
        log.warning(
            msg(
                "launcher.slurm.few_cores",
                cores=plural(int(cores), "CPU core"),
                ranks=plural(ranks, "rank"),
                wanted=4 * ranks,
            )
        )
    # Its own session: signals to this batch script must not reach srun, which would end the step at
    # once.
    if elastic := facts.get("elastic"):
        least = plural(elastic["min_ranks"], "rank")
        if elastic["no_kill"]:
            log.info(msg("launcher.slurm.elastic", ranks=least))
        else:
            log.warning(msg("launcher.slurm.plain", ranks=least, flag=options.NO_KILL))
        return ["setsid", *own_command("nodes", str(frozen.code))]
    return [
        *("setsid", "srun"),
        *(f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"),
        # Not --kill-on-bad-exit: the supervisors stop each other when a rank fails, and the first
        # one to exit must not kill one that still saves. --wait ends what is left after a
        # supervisor was killed.
        *("--kill-on-bad-exit=0", f"--wait={LAST_NODE_S}"),
        *STEP,
        *launch(frozen),
    ]


def launch(frozen: FrozenJob) -> list[str]:
    """The launch command of a node."""
    facts = frozen.facts()
    begun = manifest.newest(frozen.run.checkpoints)  # then it continues from that one
    flags = [one for one in facts["flags"] if not (begun and one.startswith("--init_from="))]
    return [
        *(str(frozen.code / LAUNCH_SCRIPT), str(facts["ranks_per_node"])),
        f"--resume={frozen.run.path}",
        *(f"--{name}={facts[name]}" for name in ("out_dir", "log_dir")),
        *flags,
    ]


def own_command(*words: str) -> list[str]:
    """A command of training.cli.submit with the frozen code."""
    return [sys.executable, str(ROOT / "lib/run_module.py"), "training.cli.submit", *words]


def end(frozen: FrozenJob, status: int, stopped: bool, environ: Mapping[str, str]) -> int:
    """End of the step (`status` of srun): requeue where that helps; the exit code of this job.
    `stopped`: SLURM has signalled the batch script, so the job was cancelled, or SLURM requeues it
    itself (preemption, `scontrol requeue`)."""
    facts, job, run = frozen.facts(), environ["SLURM_JOB_ID"], frozen.run
    resume = msg("launcher.slurm.resume", command=submit_command(facts))
    start, elastic = facts["starts"][-1], facts.get("elastic") is not None
    code = run_exit_code(run, start, status, elastic=elastic)
    if code == Exit.DONE:
        return code
    record = failure_of_start(run, start, elastic=elastic)
    meaning = EXIT_MEANING[code]
    if record and record.get("kind") in (SILENT, GONE):
        meaning = str(record["summary"])  # names the node
    ends = msg(
        "launcher.slurm.not_requeued", job=job, meaning=meaning, code=int(code), resume=resume
    )
    # SLURM itself requeues only after SlurmdTimeout, when the job has ended.
    silent = record is not None and record.get("kind") == SILENT
    if code != Exit.PREEMPTED and not silent:
        log.error(ends)
        return code
    state = state_of(job)
    if stopped or state.name not in (RUNNING, UNKNOWN):
        log.warning(msg("launcher.slurm.ends_job", job=job, state=state.name, resume=resume))
        return code
    step = saved_step(run)
    stuck = [start["step"] for start in facts["starts"][-2:]] == [step, step]
    if stuck and not state.preempted:
        without = msg("launcher.slurm.no_progress", job=job, step=step, resume=resume)
        log.error(ends if silent else without)
        return code
    problem = msg("launcher.slurm.no_requeue") if not state.requeues else requeue(run, job, step)
    if problem:
        log.warning(msg("launcher.slurm.cannot_requeue", job=job, problem=problem, resume=resume))
    return code


def run_exit_code(
    run: rundir.RunDir, start: JobStart, status: int, *, elastic: bool = False
) -> Exit:
    """Exit code as the run has recorded it. On several nodes srun reports the highest status, even
    of a node that was killed after the others had ended. `elastic`: a node may have failed without
    ending the run, and the status is that of the run (training.launcher.slurm.node_steps)."""
    if status == 0:
        return Exit.DONE
    if record := failure_of_start(run, start, elastic=elastic):
        # Ranks that were too slow to save after a stop request: the last checkpoint can be resumed.
        return (
            Exit.PREEMPTED if record["cause"] == cause_ids.PREEMPTED else Exit(record["exit_code"])
        )
    if status in EXIT_MEANING:
        return Exit(status)
    summary = rundir.read_json(run.summary)
    if summary and run.summary.stat().st_mtime >= start["time"]:
        ended = {"stopped": Exit.PREEMPTED, "done": Exit.DONE}.get(str(summary.get("status")))
        if ended is not None:
            return ended
    # A launch script that had not exec'd the supervisor yet: nothing was started, nothing is lost.
    early = (
        status in (FROM_SIGNAL + signal.SIGUSR1, FROM_SIGNAL + signal.SIGTERM)
        and start["nodes"] == 1
    )
    return Exit.PREEMPTED if early else Exit.TRAINING


def failure_of_start(
    run: rundir.RunDir, start: JobStart, *, elastic: bool = False
) -> Record | None:
    """The failure that this start has recorded, on the first node if it has one."""
    others = sorted(run.path.glob(f"node*/{run.failure.name}"))
    records = [rundir.read_json(path) or {} for path in (run.failure, *(() if elastic else others))]
    return next((record for record in records if record.get("time", 0) >= start["time"]), None)


def saved_step(run: rundir.RunDir) -> int:
    newest = manifest.newest(run.checkpoints)
    return int(newest["step"]) if newest else 0


class State(NamedTuple):
    """State of a job."""

    name: str  # RUNNING, …
    requeues: bool  # it may be requeued
    preempted: bool  # since its start: with a GraceTime it is still RUNNING


def state_of(job: str) -> State:
    """Waits for a slurmctld that is away."""
    text = controller.ask("show", "job", "-o", job).out
    begun, preempted = (_time(text, name) for name in ("StartTime", "PreemptTime"))
    return State(_state(text), "Requeue=0" not in text.split(), "" < begun <= preempted)


def _time(text: str, name: str) -> str:
    """Such as 2026-11-30T05:45:22, "": none."""
    found = re.search(rf"\b{name}=(\d{{4}}-\S+)", text)
    return found[1] if found else ""


def state_elsewhere(job: str, cluster: str, limit_s: float = controller.LIMIT_S) -> str:
    """The state of a job of any cluster, "": that of this machine, as far as it is known now."""
    answer = controller.ask_if_there("show", "job", "-o", job, cluster=cluster, limit_s=limit_s)
    return FORGOTTEN if "Invalid job id" in answer.error else _state(answer.out)


def is_over(state: str) -> bool:
    """Whether a job in this state does not start again."""
    return state in controller.OVER


def _state(text: str) -> str:
    state = re.search(r"\bJobState=(\S+)", text)
    return state[1] if state else UNKNOWN


def requeue(run: rundir.RunDir, job: str, step: int) -> str:
    """Requeue the job; the error, or ''."""
    run.event("requeue", job=job, step=step)
    log.info(msg("launcher.slurm.requeued", job=job, step=step))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # SLURM ends this start of the job at once
    answer = controller.ask("requeue", job)
    return answer.error if answer.status else ""
