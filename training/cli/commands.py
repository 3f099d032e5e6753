"""The commands of `./duet`: summary and entry point of each."""

from __future__ import annotations

from dataclasses import dataclass

OWN = ("help", "completion")


@dataclass(frozen=True)
class Command:
    """Runs `script` in the project folder, else `module` of training.cli. `first`: arguments before
    the user's."""

    name: str
    text: str
    script: str = ""
    module: str = ""
    first: tuple[str, ...] = ()


_COMMANDS = (
    Command("train", "train on two GPUs", "train_dual_gpu.sh"),
    Command(
        "train-enhanced",
        "train with automatic restarts",
        "train_dual_gpu_enhanced.sh",
    ),
    Command("run", "run your own program with N processes, instead of torchrun", module="run"),
    Command("watch", "watch over the ranks that another launcher starts", module="watch"),
    Command("launch", "train with N processes", "launch_train.sh"),
    Command("sweep", "train a grid or a list of runs, and compare them", module="sweep"),
    Command("submit", "train as a SLURM job", "submit_job.sh"),
    Command(
        "doctor",
        "check this machine and measure the memory of a step",
        "train_dual_gpu_enhanced.sh",
        "",
        ("--check",),
    ),
    Command("monitor", "watch a run, all runs (--all) or a log", "monitor_training.sh"),
    Command("runs", "list all runs: state, loss, speed, size, differences", module="runs"),
    Command("clean", "free disk space: delete runs, checkpoints, logs by rule", module="clean"),
    Command("archive", "pack a run into one file that can be read anywhere", module="archive"),
    Command("inspect", "check whether all ranks of a run are training", module="inspect"),
    Command(
        "attach",
        "show where each rank of a training is and what blocks it",
        module="supervise",
        first=("attach",),
    ),
    Command("diagnose", "find the cause of a failure from any log", module="diagnose"),
    Command("report", "write a run or a comparison of runs as one HTML file", module="report"),
    Command("sample", "continue text with a trained language model", module="sample"),
    Command("restore", "restore a video with a trained network", module="restore"),
    Command("evaluate", "measure trained models on any data", module="evaluate"),
    Command("export", "write a trained model for other programs", module="export"),
    Command("scaling", "measure the speed-up of more ranks and its limits", module="scaling"),
    Command("communication", "test communication between ranks", module="communication"),
)
COMMANDS = {command.name: command for command in _COMMANDS}
