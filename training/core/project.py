"""The project as a folder: where it is, the script of one rank, and what differs where it is an
installed package."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENTRYPOINT = "train.py"
# by pip, in the folder of Python's packages (lib/site/_duet.py)
INSTALLED = ROOT.name == "duet_home"
# Below it are experiments/, logs/ and data/: the checkout, or the folder in which an installed
# `duet` is called.
WORK = Path.cwd() if INSTALLED else ROOT
_BY_DUET = {
    "./train_dual_gpu_enhanced.sh": "duet train-enhanced",
    "./train_dual_gpu.sh": "duet train",
    "./launch_train.sh": "duet launch",
    "./submit_job.sh": "duet submit",
    "./monitor_training.sh": "duet monitor",
    "./duet ": "duet ",
}


def typed(text: str) -> str:
    """Text with commands, as they are typed here: an installed package has `duet` instead of the
    scripts."""
    if INSTALLED:
        for script, command in _BY_DUET.items():
            text = text.replace(script, command)
    return text


def shipped(path: Path) -> Path:
    """A path that the user has named; a ready file of the package, such as
    configs/dual_gpu/quickstart.py, where there is no such file."""
    return ROOT / path if INSTALLED and not path.exists() and (ROOT / path).is_file() else path
