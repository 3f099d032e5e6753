"""Paths of the project, as a checkout or as an installed package."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENTRYPOINT = "train.py"
# Installed by pip into site-packages (lib/site/_duet.py).
INSTALLED = ROOT.name == "duet_home"
# The folder of experiments/, logs/ and data/: the checkout, or the working directory of an
# installed `duet`.
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
    """`text` with its commands as they are typed here: an installed package has `duet` instead of
    the scripts."""
    if INSTALLED:
        for script, command in _BY_DUET.items():
            text = text.replace(script, command)
    return text


def shipped(path: Path) -> Path:
    """`path`, or the file of this name in the installed package (such as
    configs/dual_gpu/quickstart.py) if `path` does not exist."""
    return ROOT / path if INSTALLED and not path.exists() and (ROOT / path).is_file() else path
