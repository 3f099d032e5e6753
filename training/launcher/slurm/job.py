"""One start of a job, from the command of its step to what follows from how that ended."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from training.core import log, manifest, rundir
from training.core.errors import EXIT_MEANING, Exit
from training.launcher.slurm import options
from training.launcher.slurm.submission import LAUNCHER, FrozenJob
from training.plan.cli_args import command

if TYPE_CHECKING:
    from training.core.contracts.run_files import JobStart

LIMIT_S = 60  # for an answer of slurmctld, which may be busy
# between the end of the first node's supervisor and that of the last; its own limits are shorter
LAST_NODE_S = 60
FROM_SIGNAL = 128  # what a shell, and srun, add to the number of the signal that ended a process


def begin(frozen: FrozenJob, environ: Mapping[str, str]) -> list[str]:
    """Say and note what starts here; the command of the job's only step: one task on each node,
    which starts the ranks there."""
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
    facts["job"] = job
    rundir.write_json(frozen.record, facts)
    where = f"each of {nodes} nodes" if nodes > 1 else "1 node"
    again = f", start {count}" if count > 1 else ""
    log.info(
        f"SLURM job {job}{again}: {ranks} rank{'s' if ranks > 1 else ''} on {where} "
        f"({environ.get('SLURM_JOB_NODELIST', '')})"
    )
    log.info(f"code: {facts['code']['sentence']}, frozen in {frozen.code}")
    cores = environ.get("SLURM_CPUS_ON_NODE", "")
    if cores.isdecimal() and int(cores) < ranks:
        log.warning(
            f"{cores} CPU core{'s' if cores != '1' else ''} for {ranks} ranks: ask for more with "
            f"--cpus-per-task={4 * ranks}"
        )
    return [
        # A session of its own: what SLURM sends to this batch script must not reach srun, which
        # would end the step at once.
        *("setsid", "srun"),
        *(f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"),
        # Not --kill-on-bad-exit: the supervisors stop each other themselves when a rank fails, and
        # the first that is done with it must not have the last one killed while that saves. This
        # ends what is left when a supervisor was killed.
        *("--kill-on-bad-exit=0", f"--wait={LAST_NODE_S}"),
        # the one task starts all ranks: it must not be bound to the core of one task
        "--cpu-bind=none",
        "--export=ALL",
        *(str(frozen.code / LAUNCHER), str(ranks), f"--resume={frozen.run.path}"),
        *(f"--{name}={facts[name]}" for name in ("out_dir", "log_dir")),
        *facts["flags"],
    ]


def end(frozen: FrozenJob, status: int, stopped: bool, environ: Mapping[str, str]) -> int:
    """What follows from the end of the step (`status` of srun): the exit code of this job.
    `stopped`: SLURM has told the batch script to end, so this job was cancelled, or SLURM itself
    will start it again (preemption, `scontrol requeue`)."""
    facts, job, run = frozen.facts(), environ["SLURM_JOB_ID"], frozen.run
    go_on = "go on: " + command(options.SCRIPT, [*facts["typed"], f"--resume={facts['name']}"])
    code = run_exit_code(run, facts["starts"][-1], status)
    if code == Exit.DONE:
        return code
    if code != Exit.PREEMPTED:
        log.error(
            f"SLURM job {job} is not requeued: {EXIT_MEANING[code]} (exit {int(code)})\n    {go_on}"
        )
        return code
    state, may = _state(job)
    if stopped or state != "RUNNING":
        log.warning(
            f"SLURM ends job {job} ({state}); after preemption it starts it again, after scancel "
            f"it does not\n    {go_on}"
        )
        return code
    step = saved_step(run)
    if [start["step"] for start in facts["starts"][-2:]] == [step, step]:
        log.error(
            f"job {job} is not requeued: two starts have not come beyond step {step}; more --time "
            f"is needed\n    {go_on}"
        )
        return code
    problem = (
        "it was submitted with --no-requeue, or SLURM is configured so (JobRequeue=0)"
        if not may
        else _requeue(run, job, step)
    )
    if problem:
        log.warning(f"job {job} can not be requeued: {problem}\n    {go_on}")
    return code


def run_exit_code(run: rundir.RunDir, start: JobStart, status: int) -> Exit:
    """The exit code that the run itself has given. On several nodes srun tells the highest status
    of all, also of one that was killed when the others had ended: what the run has noted is more
    exact."""
    if status == 0:
        return Exit.DONE
    records = [
        rundir.read_json(path) or {}
        for path in (run.failure, *sorted(run.path.glob(f"node*/{run.failure.name}")))
    ]
    if told := [record for record in records if record.get("time", 0) >= start["time"]]:
        # Ranks that were too slow to save when they were asked to stop: the last checkpoint is
        # still there to go on from.
        return Exit.PREEMPTED if told[0]["cause"] == "preempted" else Exit(told[0]["exit_code"])
    if status in EXIT_MEANING:
        return Exit(status)
    if (rundir.read_json(run.summary) or {}).get(
        "status"
    ) == "stopped" and run.summary.stat().st_mtime >= start["time"]:
        return Exit.PREEMPTED
    # A launch script that had not become the supervisor yet: nothing was begun, nothing is lost.
    early = (
        status in (FROM_SIGNAL + signal.SIGUSR1, FROM_SIGNAL + signal.SIGTERM)
        and start["nodes"] == 1
    )
    return Exit.PREEMPTED if early else Exit.TRAINING


def saved_step(run: rundir.RunDir) -> int:
    newest = manifest.newest(run.checkpoints)
    return int(newest["step"]) if newest else 0


def _state(job: str) -> tuple[str, bool]:
    """(what SLURM says of the job, may it be requeued)"""
    text = scontrol("show", "job", "-o", job)[1]
    state = re.search(r"\bJobState=(\S+)", text)
    return state[1] if state else "unknown", "Requeue=0" not in text.split()


def _requeue(run: rundir.RunDir, job: str, step: int) -> str:
    """Why it did not work, or nothing."""
    run.event("requeue", job=job, step=step)
    log.info(f"SLURM job {job} is requeued and goes on at step {step}")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # SLURM ends this start of the job at once
    status, text = scontrol("requeue", job)
    return text.strip() if status else ""


def scontrol(*words: str) -> tuple[int, str]:
    """(status, what it said)"""
    try:
        done = subprocess.run(
            ["scontrol", *words], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout + done.stderr
