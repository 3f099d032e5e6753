"""Stable codes of problems, warnings, alerts, verdicts and events, with their meanings.

Programs match codes, never texts. The tables of docs/codes.md are generated from this module:
`python lib/run_module.py training.core.codes`.
"""

from __future__ import annotations

import re

from training.core.problem_codes import PROBLEMS

# Prefix of check codes, in `./duet doctor` and at every start: a failed check is a problem, a
# doubtful one a warning.
CHECKS = "preflight"
WARNINGS = {
    "warning.checkpoint_not_pruned": "an old checkpoint could not be deleted",
    "warning.checkpoint_not_saved": "a checkpoint could not be saved; the next save tries again",
    "warning.checkpoint_skipped": "a damaged or incomplete checkpoint was skipped on resume",
    "warning.collectives_hidden": "the collectives of a rank cannot be observed from outside",
    "warning.debugger": "a debugger holds a rank; the run waits for it",
    "warning.exception_caught": "a rank of a finished run has printed exceptions and continued",
    "warning.heartbeat_unreadable": "hang detection is off: a heartbeat file cannot be read",
    "warning.inject_missed": "an injected fault did not happen",
    "warning.inspector": "a finding of DDPInspector; see `kind`",
    "warning.loss_not_finite": "the last loss that a script printed is NaN or infinite",
    "warning.machine_overloaded": "a rank is waiting for a CPU core",
    "warning.no_heartbeat": "the heartbeat of a rank is overdue, but its process is still working",
    "warning.optimizer_changed": "a user's task has another optimizer, or other parameter groups, "
    "than at the checkpoint; its state is not continued",
    "warning.profile": "a rank could not be profiled, or only in part; the training continues",
    "warning.rank_missing": "ranks are waiting for one that has not arrived",
    "warning.replica": "the second machine has no copy of the newest checkpoint",
    "warning.sample": "the sample at the end of the training has failed; the training is complete",
    "warning.score_direction": "`--keep_best` keeps the lowest value of a score of unknown name",
    "warning.slow_rank": "the other ranks of a script wait for one rank again and again",
    "warning.still_compiling": "a rank is overdue and compiles",
    "warning.still_reading": "a rank is overdue and still reading from disk",
    "warning.task_changed": "the file of a user's task has changed since the checkpoint",
    "warning.thread_exception": "an exception in a thread of a rank that continues to run",
    "warning.tracker_stuck": "W&B or TensorBoard does not answer; the training continues",
}
ALERTS = {
    "alert.clock": "the system clock was set back",
    "alert.disk_full": "the disk is nearly full",
    "alert.foreign_process": "another user's process on a GPU of the run",
    "alert.gpu_idle": "no step while the GPU is idle",
    "alert.gpu_spins": "no step while the GPU spins in a collective",
    "alert.gpu_throttled": "the GPU is throttled",
    "alert.loss_not_finite": "the loss is NaN or infinite",
    "alert.no_step": "no step for far longer than usual",
    "alert.ram_full": "the memory is nearly full",
    "alert.shm_full": "/dev/shm is nearly full",
    "alert.slow_rank": "a rank computes longer than the others",
}
VERDICTS = {
    "blocked": "a rank is blocked in I/O",
    "desync": "the ranks call different collectives",
    "died": "a rank has ended, by a signal or with a status",
    "error": "a rank has failed with an exception",
    "gone": "a machine has disconnected",
    "hang": "a rank is stuck, or all ranks wait for each other",
    "silent": "a machine does not respond",
    "stopped": "a rank is stopped by a signal or a debugger",
    "uneven": "ranks have different numbers of batches or take different branches",
    # Reasons for the absence of a verdict.
    "collectives_advance": "no hang: collectives advance",
    "elsewhere": "undecided: all local ranks wait, possibly for another machine",
    "gpu_works": "no hang: a GPU may still be computing",
    "locked_out": "undecided: a rank waits for a lock that another program holds",
    "loops": "undecided: a rank stays in the same Python functions",
    "no_stack": "undecided: stacks cannot be read",
    "paused": "all ranks are stopped by a signal",
    "quiet": "undecided: no rank waits for another and none is working",
    "sampling_failed": "undecided: sampling failed",
    "single_rank": "undecided: a single rank is waiting",
    "too_few_samples": "undecided: not observed for long enough",
    "wait_may_end": "undecided: a rank is in a sleep or a request, the others wait for it",
    "works": "no hang: a rank is working",
}
EVENTS = {
    "checkpoint": "a checkpoint was saved",
    "end": "rank 0 has left the training loop",
    "eval": "an evaluation",
    "failure": "the run failed; see `cause`",
    "given_up": "no further restart, with the reason",
    "injected": "a fault is being injected",
    "inspection": "the comparisons of DDPInspector",
    "pace": "the time of a step after a restart with another number of ranks",
    "recovered": "the first step after a restart",
    "replica": "the second machine has a verified copy of a checkpoint",
    "requeue": "the job was requeued in SLURM",
    "restart": "the ranks are restarted, with the reason",
    "resume": "the run resumes from a checkpoint",
    "shards": "the ranks have verified their shares of an epoch against each other",
    "start": "the ranks begin to train",
    "submitted": "the job was submitted to SLURM",
    "takeover": "another machine coordinates the run from now on",
    "verdict": "the guilty rank of a hang or a failure; see `kind`",
    "warning": "a warning; see `code`",
}
TABLES = {
    "Problems": (
        "Why a command was rejected or a run stopped itself (exit code 2 or 3; "
        "`run.folder_lost` and, during a run, `run.unwritable`: 4). `--check --json` lists them as "
        "`problems`. Other commands with `--json` write nothing to standard output then, and the "
        "text to standard error.",
        PROBLEMS,
    ),
    "Events": ("`event` in `events.jsonl`.", EVENTS),
    "Warnings": ("`code` of a `warning` event.", WARNINGS),
    "Verdicts": (
        "`kind` of a `verdict` event and of `verdict` in `attach --json`. The codes from "
        "`collectives_advance` on are its `reason`, where it has no verdict.",
        VERDICTS,
    ),
    "Alerts": ("`code` of an entry in `alerts`, in the monitor's `--json`.", ALERTS),
}


def of_check(name: str) -> str:
    """The name of a check as part of a code: 'GPU 0 state' → gpu_state."""
    words = re.findall(r"[a-z]+", {"W&B": "wandb"}.get(name, name).lower().replace("/dev/", ""))
    return "_".join(words)


def table() -> list[str]:
    """The tables of docs/codes.md."""
    lines: list[str] = []
    for title, (about, codes) in TABLES.items():
        lines += ["", f"## {title}", "", about, "", "| code | meaning |", "|---|---|"]
        lines += [f"| `{code}` | {meaning} |" for code, meaning in codes.items()]
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
