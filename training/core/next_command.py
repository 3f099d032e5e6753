"""The command that continues a run."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from training.core import rundir
from training.core.project import typed

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan


def next_command(plan: Plan, run: rundir.RunDir, **changes: object) -> str:
    """The command that resumes `run`, with flags from `changes`. The run keeps its configuration,
    so the command is short."""
    script = plan["command"]["script"]
    program = {
        "launch_train.sh": f"./launch_train.sh {plan['ranks']}",
        "train.py": "python train.py",
    }.get(script, f"./{script}")
    if script == "train.py" and plan["ranks"] > 1:
        program = f"torchrun --nproc_per_node={plan['ranks']} train.py"
    kept = {n: plan["config"][n] for n in ("out_dir", "log_dir") if plan["origins"][n] != "default"}
    flags = kept | {"resume": run.name} | changes
    return typed(
        " ".join(
            [program, *(f"--{name}={shlex.quote(str(value))}" for name, value in flags.items())]
        )
    )
