"""The option list of `--help` of the scripts, for lib/help.sh. Runs under `python -I -S` before
anything is installed."""

from __future__ import annotations

from pathlib import Path

from training.launcher.slurm import options
from training.plan.option_help import option_lines


def of_script(path: str) -> list[str]:
    if Path(path).resolve().name != options.SCRIPT:
        return option_lines()
    return option_lines({name.replace("-", "_") for name in options.REFUSED})
