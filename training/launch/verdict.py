"""What an outcome means: exit code, and for a failure the card that a person reads and failure.json holds."""

from __future__ import annotations

import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from training import rundir
from training.config.batch import device_choices
from training.data import store
from training.errors import RANK_DISK_FULL, Exit
from training.host.process import STOP_SIGNALS
from training.launch.attempt import Outcome
from training.launch.output import tail
from training.summary import next_command

SHOWN_LINES = 10
UNDERLINE = re.compile(r"[\s^~]+")  # Python 3.11 marks the column below each line of a traceback
# Structured evidence only: the exception that the failing rank itself reported.
CAUSE_BY_TYPE = {
    "NotFinite": "nan_loss",
    "ParametersDiffer": "ddp_params_mismatch",
    "OutOfMemoryError": "gpu_oom",
    "BarrierError": "hang",
    "MemoryError": "host_oom_killed",
}
# How a rank ends whose peer has gone (gloo, NCCL, the store): it is not where it began.
LOST_PEER = re.compile(
    r"(closed|reset) by (the )?(remote )?peer|broken pipe|socket (is )?closed|remote process exited|connection was (likely )?closed", re.I
)
# A failure of the machine may pass; an exception in the code comes back.
RETRYABLE_SIGNALS = {signal.SIGKILL, signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT}


def exit_code(outcome: Outcome) -> int:
    """The launcher's exit status."""
    if outcome.hang_s is not None:
        return Exit.HANG
    if outcome.torn_down:
        return 128 + signal.SIGABRT  # the script's own status, as a shell shows it: what it did is done
    if outcome.killed:
        return Exit.INTERRUPTED if outcome.asked == Exit.INTERRUPTED else Exit.TRAINING
    if stopped_early(outcome):
        # A script that dies of the signal has saved nothing that we know of: not 75, which promises that.
        return outcome.asked if outcome.ours or outcome.asked == Exit.INTERRUPTED else 128 - (outcome.guilty or (None, 0))[1]
    if outcome.guilty:
        status = outcome.guilty[1]
        return Exit(status) if outcome.ours and status in (Exit.CONFIG, Exit.RESOURCES) else Exit.TRAINING
    codes = {status for _, status in outcome.ended}
    for code in (Exit.INTERRUPTED, Exit.PREEMPTED):
        if code in codes:
            return code
    return Exit.DONE


def stopped_early(outcome: Outcome) -> bool:
    """Asked to stop while a rank was still starting: it dies of the signal, since there is nothing to save yet."""
    return outcome.asked != Exit.DONE and outcome.guilty is not None and -outcome.guilty[1] in STOP_SIGNALS


def retryable(outcome: Outcome) -> bool:
    """Is another attempt worth it? Only for ranks that were killed; never for exceptions of the code."""
    return outcome.guilty is not None and outcome.asked == Exit.DONE and -outcome.guilty[1] in RETRYABLE_SIGNALS


def failure(outcome: Outcome, run: rundir.RunDir, plan: dict[str, Any]) -> dict[str, Any]:
    """The content of failure.json."""
    rank, status = (outcome.here if outcome.elsewhere else outcome.guilty) or (None, 0)
    errors = [e for p in run.ranks.glob("rank*.error.json") if (e := rundir.read_json(p))]
    first = min(errors, key=lambda e: e["time"], default=None)
    own = next((e for e in errors if e["rank"] == rank), None)
    if rank is None and first is not None and outcome.hang_s is None:  # torchrun tells only that something failed
        rank, own = first["rank"], first
    said_by = rank
    rank = own["guilty_rank"] if own else rank
    log = next((f for r in (rank, said_by) if r is not None and (f := run.rank_log(r)).exists()), run.ranks / "torchrun.log")
    where = own["where"] if own else None
    if outcome.killed or stopped_early(outcome):
        cause = "interrupted" if outcome.asked == Exit.INTERRUPTED else "preempted"
        summary = _stop(outcome)
    elif outcome.torn_down:
        cause, summary = "unknown", "the script had come to its end; then its process was aborted (SIGABRT) while it was torn down"
    elif outcome.ours and status in (Exit.CONFIG, Exit.RESOURCES):
        cause, summary = "config_error", "the rank refused its input: see its message above"
    elif outcome.elsewhere and outcome.here is None:
        cause, summary = "peer_died", "another machine failed first, and has not said how"
    elif outcome.hang_s is not None:
        cause, summary = "hang", _hang_summary(outcome, rank)
        where = _stuck_at(run, rank) if rank is not None else None
    elif (outcome.ours and status == RANK_DISK_FULL) or (own and own["disk_full"]):
        cause, summary = "disk_full", f"no space left on the disk of {run.path}"
    elif own:
        cause, summary = (
            CAUSE_BY_TYPE.get(own["type"], "unknown"),
            f"{own['type']}: {own['message'].splitlines()[0] if own['message'] else ''}",
        )
    elif outcome.ours and -status == signal.SIGBUS and (changed := store.changed(run)):
        cause, summary = "unknown", f"killed by SIGBUS: {changed}; the next start prepares it again"
    else:
        cause, summary = "unknown", _death(status)
    return {
        "cause": cause,
        "victim": own is not None and LOST_PEER.search(own["message"]) is not None,
        "rank": rank,
        "summary": summary,
        "where": where,
        "phase": outcome.phases.get(rank) if rank is not None else None,
        "phases": {str(r): p for r, p in sorted(outcome.phases.items())},
        "status": status,
        "exit_code": int(exit_code(outcome)),
        "evidence": [line for line in tail(log, 2 * SHOWN_LINES) if not UNDERLINE.fullmatch(line)][-SHOWN_LINES:],
        "log": str(log),
        "advice": _advice(cause, status, run, plan) if outcome.ours else _advice_for_script(outcome, run),
        "time": time.time(),
    }


def _stop(outcome: Outcome) -> str:
    if not outcome.ours:
        return "the script was stopped" if stopped_early(outcome) else "the script was stopped at once"
    if stopped_early(outcome):
        return "stopped before the training began"
    return "stopped at once: nothing was saved since the last checkpoint"


def _death(status: int) -> str:
    if status < 0:
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"
    if status == 0:
        return "left with status 0 in the middle of the training"
    return f"left with status {status}"


def _hang_summary(outcome: Outcome, rank: int | None) -> str:
    who = f"rank {rank} is stuck in '{outcome.phases.get(rank)}'" if rank is not None else "all ranks wait for each other"
    return f"no progress for {outcome.hang_s:.0f} s: {who}"


def _stuck_at(run: rundir.RunDir, rank: int) -> str | None:
    """Innermost line of the rank's main thread, from its stack dump (the main thread comes last)."""
    stacks = tail(Path(run.ranks, f"rank{rank}.stacks"), 400)
    starts = [i for i, line in enumerate(stacks) if line.startswith(("Thread ", "Current thread "))]
    frames = [line.strip() for line in stacks[starts[-1] + 1 :] if line.startswith("  File ")] if starts else []
    own = next((f for f in frames if "site-packages" not in f and "/lib/python" not in f), frames[0] if frames else None)
    return own.removeprefix("File ").replace('", line ', ":").strip('"').split(" in ")[0] if own else None


def _advice(cause: str, status: int, run: rundir.RunDir, plan: dict[str, Any]) -> list[str]:
    if cause == "disk_full":
        free = shutil.disk_usage(run.path).free / 1e6
        return [f"make room below {run.path.parent} ({free:.0f} MB free), then {next_command(plan, run)}"]
    if cause == "gpu_oom":
        return _smaller_batch(run, plan)
    if cause == "nan_loss":
        return ["lower the learning rate (--matrix_lr) or use --precision=fp32"]
    if cause == "hang":
        return [f"stacks of every rank: {run.ranks}/rank*.stacks", "do not raise --hang_timeout: it only waits longer"]
    if status == -signal.SIGKILL:
        return [
            "somebody, or the kernel when memory ran out, killed it: see `dmesg | tail`",
            f"go on from the last checkpoint: {next_command(plan, run)}",
        ]
    return [f"the whole output of each rank: {run.ranks}/"]


def _advice_for_script(outcome: Outcome, run: rundir.RunDir) -> list[str]:
    if outcome.torn_down:
        return ["what it trained is done; end the script with torch.distributed.destroy_process_group(), and it leaves with status 0"]
    if outcome.guilty and outcome.guilty[1] == -signal.SIGKILL:
        return ["somebody, or the kernel when memory ran out, killed it: see `dmesg | tail`"]
    return [f"the whole output of each rank: {run.ranks}/"]


def _smaller_batch(run: rundir.RunDir, plan: dict[str, Any]) -> list[str]:
    """The next smaller device batch with the same tokens per step."""
    now, seq, ranks = (plan["batch"][n] for n in ("device_sequences", "seq_len", "world_size"))
    smaller = [d for d in device_choices(seq, ranks, plan["config"]["total_batch_size"]) if d < now]
    if not smaller:
        return [f"device_batch_size is {now} already: try a smaller --max_seq_len or --depth"]
    total, factor = plan["config"]["total_batch_size"], now / smaller[-1]
    text = f"device_batch_size is {now}: try {smaller[-1]}, the same {total} tokens per step with {factor:g} × accumulation"
    return [text, next_command(plan, run, device_batch_size=smaller[-1])]


def card(record: dict[str, Any]) -> str:
    """The failure for people."""
    who = f"rank {record['rank']}" if record["rank"] is not None else "no single rank"
    who += f" on node {record['node']}" if "node" in record else ""
    lines = [
        f"Cause      {record['cause']}: {record['summary']}",
        f"Who        {who}" + (f", in {record['phase']}" if record["phase"] else ""),
    ]
    if record["where"]:
        lines.append(f"Where      {record['where']}")
    others = [f"rank {r}: {p}" for r, p in record["phases"].items() if str(record["rank"]) != r]
    if others:
        lines.append(f"Others     {'; '.join(others)}")
    lines += ["Evidence", *(f"    │ {line[:160]}" for line in record["evidence"])]
    lines += [f"{'Try' if i == 0 else '':<11}{text}" for i, text in enumerate(record["advice"])]
    lines += [f"Log        {record['log']}"]
    return "\n".join(f"  {line}" for line in lines)
