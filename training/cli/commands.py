"""The commands behind `./duet`: what each is for, and what runs it."""

from __future__ import annotations

from dataclasses import dataclass

OWN = ("help", "completion")


@dataclass(frozen=True)
class Command:
    """`script`: of the launch scripts, in the project's folder; else `module` of training.cli.
    `first`: arguments before the user's."""

    name: str
    text: str
    script: str = ""
    module: str = ""
    first: tuple[str, ...] = ()


_COMMANDS = (
    Command("train", "train on two GPUs", "train_dual_gpu.sh"),
    Command(
        "train-enhanced",
        "the same, with a resource report, an analysis of a failure, and restarts",
        "train_dual_gpu_enhanced.sh",
    ),
    Command(
        "launch", "train with N processes, or start your own script with them", "launch_train.sh"
    ),
    Command("submit", "train as a job of SLURM", "submit_job.sh"),
    Command(
        "doctor",
        "plan, check this machine and measure the memory of a step; start nothing",
        "train_dual_gpu_enhanced.sh",
        "",
        ("--check",),
    ),
    Command("monitor", "watch a run or a log", "monitor_training.sh"),
    Command("inspect", "are all ranks of a running training at work?", module="inspect"),
    Command(
        "attach",
        "where each rank of any training is, and who waits for whom",
        module="supervise",
        first=("attach",),
    ),
    Command("diagnose", "the cause of a failure, from any log", module="diagnose"),
    Command("report", "a run, or a comparison of several, as one HTML file", module="report"),
    Command("scaling", "measure what a second rank brings, and what limits it", module="scaling"),
    Command("communication", "prove that the ranks can talk", module="communication"),
)
COMMANDS = {command.name: command for command in _COMMANDS}
