"""The supervisor of one machine: prepares the data, starts the ranks, watches and reaps them, says what became of them.

    python lib/run_module.py training.supervise RUN_DIR [--analyse] [--recover]

It is the process that the launch scripts become, so its exit status is theirs. It imports no torch.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import sys
import time
from typing import Any

from training import console, heartbeat, rundir, summary
from training import plan as planner
from training.data import store
from training.errors import Exit, UserError
from training.launch import team, verdict
from training.launch.attempt import Attempt
from training.launch.guardian import Guardian
from training.launch.output import tail


def main(argv: list[str]) -> int:
    run, stages = rundir.RunDir(argv[0]), set(argv[1:])
    plan = rundir.read_json(run.plan)
    if plan is None:
        console.error(f"{run.plan} is missing or damaged")
        return Exit.CONFIG
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal does not end the training
    os.environ["DUET_SUPERVISED"] = "1"
    console.open_log(plan["log_file"])
    planner.announce(plan)
    rundir.write_json(run.supervisor, {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time(), "ranks": []})
    try:
        if not team.is_script(plan):
            store.prepare(run, plan)
    except UserError as error:
        planner.withdraw(run)
        console.report(error)
        return error.code
    except KeyboardInterrupt:
        console.warning("interrupted while preparing the data")
        return Exit.INTERRUPTED
    for old in (run.summary, run.failure, run.plan_before):
        old.unlink(missing_ok=True)
    try:
        with Guardian() as token:
            return _attempts(run, plan, stages, token)
    except UserError as error:
        console.report(error)
        return error.code


def _attempts(run: rundir.RunDir, plan: dict[str, Any], stages: set[str], token: str) -> int:
    failed_at: list[int] = []  # the step of each failure
    for attempt in itertools.count(1):
        outcome = Attempt(run, plan, team.alone(plan), token).go()
        code = verdict.exit_code(outcome)
        if not outcome.guilty and not outcome.killed:
            return _regular_end(run, plan, code)
        record = verdict.failure(outcome, run, plan)
        try:
            rundir.write_json(run.failure, record)
        except OSError as error:
            console.warning(f"{run.failure} can not be written: {error.strerror}")
        if outcome.torn_down:
            console.warning(f"training finished, then a rank was aborted (exit {int(code)})\n{verdict.card(record)}")
            return code
        if code in (Exit.CONFIG, Exit.RESOURCES):  # the rank has said what is wrong
            return code
        if outcome.killed or verdict.stopped_early(outcome):
            console.warning(f"{record['summary']} (exit {int(code)})")
            return code
        run.event("failure", cause=record["cause"], rank=record["rank"], text=record["summary"])
        console.error(f"training failed\n{verdict.card(record)}")
        if "--analyse" in stages:
            console.info(f"analysis\n{analysis(run)}")
        failed_at.append(max((b.step for b in heartbeat.read_all(run.heartbeats)), default=0))
        if "--recover" not in stages or not verdict.retryable(outcome):
            break
        if attempt > plan["config"]["retries"]:
            console.error(f"given up after {attempt} attempts (--retries={plan['config']['retries']})")
            break
        if failed_at.count(failed_at[-1]) >= 2:
            console.error(f"given up: the second failure at step {failed_at[-1]}")
            break
        console.warning(f"restarting from the last checkpoint (attempt {attempt + 1} of {plan['config']['retries'] + 1})")
        run.event("restart", attempt=attempt + 1, cause=record["cause"], step=failed_at[-1])
        run.failure.unlink(missing_ok=True)
    return code


def _regular_end(run: rundir.RunDir, plan: dict[str, Any], code: int) -> int:
    if team.is_script(plan):
        return _script_end(run, plan, code)
    text = summary.render(run, plan)
    if code == Exit.DONE:
        console.success(f"training finished\n{text}".rstrip())
    else:
        why = "interrupted" if code == Exit.INTERRUPTED else "stopped on request"
        console.warning(f"{why}, checkpoint saved (exit {int(code)})\n{text}".rstrip())
    return code


def _script_end(run: rundir.RunDir, plan: dict[str, Any], code: int) -> int:
    seconds = time.time() - plan["created"]
    ranks = f"{plan['ranks']} rank{'s' if plan['ranks'] > 1 else ''}"
    status = "finished" if code == Exit.DONE else "stopped"
    rundir.write_json(run.summary, {"status": status, "ranks": plan["ranks"], "seconds": seconds, "exit_code": int(code)})
    if code == Exit.DONE:
        console.success(f"script finished: {ranks} ended with status 0 after {seconds:.1f} s; what each said: {run.ranks}/")
    else:
        console.warning(f"script stopped on request (exit {int(code)}); what each rank said: {run.ranks}/")
    return code


def analysis(run: rundir.RunDir) -> str:
    """What every rank was doing and said last, and what the machine looked like (enhanced script)."""
    import psutil

    lines = []
    for beat in heartbeat.read_all(run.heartbeats):
        silent = time.time() - beat.wall_time
        lines.append(f"  rank {beat.rank}: {beat} in epoch {beat.epoch}, {silent:.1f} s ago")
        lines += [f"      │ {line[:140]}" for line in tail(run.rank_log(beat.rank), 4)]
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(run.path)
    lines.append(
        f"  host memory {memory.percent:.0f} % used, disk {100 * disk.used / disk.total:.0f} % used, load {os.getloadavg()[0]:.1f}"
    )
    for check in (rundir.read_json(run.preflight) or {"checks": []})["checks"]:
        if check["status"] != "ok":
            lines.append(f"  at the start: {check['name']}: {check['text']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
