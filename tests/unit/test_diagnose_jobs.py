"""Logs to which a scheduler has appended several jobs: the last one is diagnosed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import each
from training.diagnose import card
from training.diagnose.result import diagnose
from training.diagnose.scan import FIRST, LAST

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
GOOD, BAD = "COMPLETED (exit code 0)", "FAILED (exit code 1)"
# printed by an epilog
SEFF = """Job ID: %d
Cluster: hpc1
User/Group: ann/ml
State: %s
Cores: 8
CPU Utilized: 00:10:00
CPU Efficiency: 50.00%% of 00:20:00 core-walltime
Memory Utilized: 2.00 GB
"""
JOBSTATS = """====================
Slurm Job Statistics
====================
         Job ID: %d
  NetID/Account: ann/ml
       Job Name: train
          State: %s
          Nodes: 1
       Run Time: 00:20:00

   Overall Utilization
  CPU utilization  [|||     5%%]
"""
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


@each(
    ("outputs", "cause", "jobs"),
    [
        ([OOM, MISSING], "file_not_found", 2),
        ([MISSING, OOM, MISSING], "file_not_found", 3),
        ([STEPS + DONE, OOM], "gpu_oom", 2),
        ([OOM, STEPS + DONE], "none", 2),
        ([MISSING], "file_not_found", None),
    ],
)
@each("header", ["", "SLURM_JOB_ID=%d\n", "SLURM_JOB_ID=%d\njob_id: 101\n", "Job ID: %d\n"])
@each("footer", [SEFF, JOBSTATS])
def test_a_footer_ends_a_job(
    outputs: list[str], cause: str, jobs: int | None, header: str, footer: str, tmp_path: Path
) -> None:
    text = ""
    for number, output in enumerate(outputs, 4411):
        start = header.replace("%d", str(number))
        text += f"{start}{output}{footer % (number, GOOD if DONE in output else BAD)}"
    log = tmp_path / "train.log"
    log.write_text(text)
    record = diagnose([log])
    assert (record["cause"], record.get("jobs"), record["also"]) == (cause, jobs, [])


@each(
    ("text", "jobs"),
    [
        (f"Job ID: 4411\n{OOM}Job ID: 4420\n", None),
        (f"Job ID: 4411\n{OOM}Job ID: 4420\n{SEFF % (4411, BAD)}", None),
        (f"Job ID: 4400\n{MISSING}Job ID: 4411\n{OOM}Job ID: 4420\n", 2),
        (f"SLURM_JOB_ID=4411\n{MISSING}Job ID: 4420\nSLURM_JOB_ID=4420\n{OOM}", 2),
        (f"{OOM}Job ID: 4420\nJob ID: 4421\n", None),
        (f"SLURM_JOB_ID=4411\n{SEFF % (4400, BAD)}{OOM}", None),
    ],
)
def test_the_number_of_another_job_does_not_end_one(
    text: str, jobs: int | None, tmp_path: Path
) -> None:
    log = tmp_path / "train.log"
    log.write_text(text)
    record = diagnose([log])
    assert (record["cause"], record.get("jobs")) == ("gpu_oom", jobs)


def test_a_number_after_the_training_does_not_start_a_job(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(f"{OOM}=== Job ID: 4411 ===\n{OOM}=== Job ID: 4420 ===\n")
    record = diagnose([log])
    assert record["cause"] == "gpu_oom" and "jobs" not in record


@each("header", ["\x1b[32mJob ID: %d\x1b[0m\n", "\x1b[1mJob ID:\x1b[0m %d\n"])
def test_a_coloured_header_is_one(header: str, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    text = f"{header % 4411}{OOM}{header % 4420}{MISSING}"
    log.write_text(text)
    record = diagnose([log])
    assert (record["cause"], record.get("jobs")) == ("file_not_found", 2)
    assert record["line"] and text.splitlines()[record["line"] - 1] == record["evidence"]


@each(
    "rest",
    [
        "Moving results to /scratch\n",
        "PS:\n\nFail to open stderr file /x/train.err: Permission denied.\n"
        "The stderr output is included in this report.\n\n",
    ],
)
@each("outputs", [[OOM], [MISSING, OOM]])
def test_text_after_a_report_does_not_start_a_job(
    rest: str, outputs: list[str], tmp_path: Path
) -> None:
    log = tmp_path / "train.log"
    log.write_text("".join(lsf(output) + rest for output in outputs))
    record = diagnose([log])
    assert (record["cause"], record.get("jobs", 1)) == ("gpu_oom", len(outputs))


@each("output", ["", "no GPU for this job\n"])
def test_a_job_with_a_report_and_no_more_is_the_last_one(output: str, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(lsf(OOM) + lsf(output))
    assert (diagnose([log])["cause"], diagnose([log])["jobs"]) == ("unknown", 2)


@each("above", [True, False])
@each("end", [FAILED, "Exited by signal 9.\n", "Exited with signal termination: 9.\n"])
@each("output", [STEPS, STEPS + DONE, f"sh: exited with code 1, retrying\n{STEPS}{DONE}"])
def test_a_report_of_a_failure_is_about_the_end(
    above: bool, end: str, output: str, tmp_path: Path
) -> None:
    log = tmp_path / "train.log"
    log.write_text(lsf(output, end, above=above))
    record = diagnose([log])
    assert (record["cause"], record["evidence"]) == ("unknown", end.strip())


def test_a_failure_quoted_from_the_script_is_none(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    report = lsf(STEPS + DONE, "Successfully completed.\n", above=False)
    log.write_text(report.replace("train.py\n", "train.py || echo exited with code 1\n"))
    assert diagnose([log])["cause"] == "none"


def test_a_count_beyond_the_places_kept_is_a_lower_bound(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("".join(f"Job ID: {1000 + i}\n{MISSING}" for i in range(FIRST + LAST + 9)))
    record = diagnose([log])
    assert record["jobs"] == FIRST + LAST and record["jobs_at_least"]
    assert f"the last one of at least {FIRST + LAST} jobs in this log" in card.draw(record)


@each(
    ("starts", "cause"),
    [
        ([OOM, MISSING], "file_not_found"),
        ([OOM, ""], "gpu_oom"),
        ([OOM, "loading data\n"], "gpu_oom"),
        ([OOM, MISSING, ""], "file_not_found"),
        ([OOM, "step 1 loss 3.0\n"], "none"),
        ([OOM, DONE], "none"),
    ],
)
def test_a_start_of_duet_after_a_failure_is_another_one(
    starts: list[str], cause: str, tmp_path: Path
) -> None:
    log = tmp_path / "train.log"
    start = "[INFO] 2025-11-03 09:12:01 run directory: /home/ann/experiments/a\n"
    log.write_text("".join(start + output for output in starts))
    assert diagnose([log])["cause"] == cause
