"""Logs to which a scheduler has appended several jobs: the last one is diagnosed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import each
from training.diagnose import card
from training.diagnose.result import diagnose

STEPS = "".join(f"step {i} loss {3 - i / 1000:.3f} lr 1e-3\n" for i in range(1, 40))
DONE = "Training finished in 160 s\n"
TRACEBACK = (
    'Traceback (most recent call last):\n  File "/t/train.py", line 8, in <module>\n    f()\n'
)
MISSING = f"{TRACEBACK}FileNotFoundError: [Errno 2] No such file or directory: '/data/train.bin'\n"
OOM = f"{STEPS}{TRACEBACK}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
VALUE = f"{STEPS}{TRACEBACK}ValueError: bad sample 17\n"
MEMORY = (
    "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.\nExited with exit code 1.\n"
)
# lines of a report before and after the place of the job's end
REPORT = (
    """
------------------------------------------------------------
Sender: LSF System <lsfadmin@gpu07>
Subject: Job 12: <train> in cluster <hpc1> Exited

Started at Mon Nov  3 09:12:04 2025

Your job looked like:

------------------------------------------------------------
# LSBATCH: User input
torchrun --nproc-per-node=2 train.py
------------------------------------------------------------

""",
    "\nResource usage summary:\n\n    CPU time :   310.20 sec.\n\n",
)
ABOVE = "The output (if any) is above this job summary.\n\n"
BELOW = "The output (if any) follows:\n\n"
STDERR = "PS:\n\nRead file <train.err> for stderr output of this job.\n\n"
FAILED = "Exited with exit code 1.\n"


def lsf(output: str, end: str = FAILED, *, above: bool = True) -> str:
    """As `bsub -o FILE` appends it."""
    report = f"{REPORT[0]}{end}{REPORT[1]}"
    return f"{output}{report}{ABOVE}" if above else f"{report}{BELOW}{output}"


@each("above", [True, False])
@each(
    ("outputs", "end", "cause"),
    [
        ([MISSING, OOM], FAILED, "gpu_oom"),
        ([OOM, MISSING], FAILED, "file_not_found"),
        ([MISSING, STEPS + DONE, VALUE], FAILED, "exception"),
        ([OOM, MISSING, STEPS + DONE], "Successfully completed.\n", "none"),
        ([MISSING, STEPS], MEMORY, "host_oom_killed"),
    ],
)
def test_of_jobs_of_lsf_the_last_one_counts(
    above: bool, outputs: list[str], end: str, cause: str, tmp_path: Path
) -> None:
    log = tmp_path / "train.log"
    ends = [FAILED] * (len(outputs) - 1) + [end]
    log.write_text("".join(lsf(o, e, above=above) for o, e in zip(outputs, ends, strict=True)))
    record = diagnose([log])
    assert (record["cause"], record["jobs"], record["also"]) == (cause, len(outputs), [])
    assert f"the last one of {len(outputs)} jobs in this log" in card.draw(record)
    if record["line"]:  # counted from the start of the file
        assert log.read_text().splitlines()[record["line"] - 1] == record["evidence"]


def test_a_job_that_still_runs_is_the_last_one(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(lsf(OOM) + STDERR + VALUE)
    assert diagnose([log])["cause"] == "exception"


@each("above", [True, False])
def test_one_job_with_a_report_is_one(above: bool, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(lsf(OOM, above=above) + STDERR)
    record = diagnose([log])
    assert record["cause"] == "gpu_oom" and "jobs" not in record


@each("header", ["Job ID: %d", "SLURM_JOB_ID=%d", "=== Job ID: %d ===", "PBS_JOBID: %d.server.hpc"])
def test_another_number_in_a_header_is_another_job(header: str, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(f"{header % 4411}\n{OOM}{header % 4420}\n{MISSING}")
    assert diagnose([log])["cause"] == "file_not_found"


@pytest.mark.parametrize(
    "later",
    ["Job ID: 4411\n", "Submitted batch job 4420\n", "Job ID: 4420\nJob ID: 4411\n"],
)
def test_the_same_job_and_jobs_at_the_same_time_are_not_separated(
    later: str, tmp_path: Path
) -> None:
    log = tmp_path / "train.log"
    log.write_text(f"Job ID: 4411\n{OOM}{later}")
    record = diagnose([log])
    assert record["cause"] == "gpu_oom" and "jobs" not in record


def test_a_start_of_duet_after_a_failure_is_another_one(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    start = "[INFO] 2025-11-03 09:12:01 run directory: /home/ann/experiments/a\n"
    log.write_text(f"{start}{OOM}{start}{MISSING}")
    assert diagnose([log])["cause"] == "file_not_found"
