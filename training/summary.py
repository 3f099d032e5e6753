"""The end of a run in one screen, from summary.json; shown by the supervisor, or by rank 0 where there is none."""

from __future__ import annotations

import math
import shlex
from typing import Any

from training import rundir


def render(run: rundir.RunDir, plan: dict[str, Any]) -> str:
    """What was trained, how well, a sample, where everything is, what to do next. Empty without a summary."""
    s = rundir.read_json(run.summary)
    if s is None:
        return ""
    more = {} if s["status"] == "stopped" else longer(plan["config"], s["steps"])
    first, last = s["loss_first"] / math.log(2), s["loss_last"] / math.log(2)
    unit = "byte" if plan["config"]["tokenizer"] == "bytes" else "token"
    seen = s.get("val_bpb_last") is not None
    validation = f"; validation {s['val_bpb_first']:.3f} → {s['val_bpb_last']:.3f} bits per byte" if seen else ""
    lines = [
        f"Model      GPT, depth {plan['config']['depth']}, {s['parameters'] / 1e6:.2f} M parameters",
        f"Trained    {s['steps']} steps, {s['tokens'] / 1e6:.2f} M tokens of {plan['data']['name']}{_when(s)}, "
        f"{plan['ranks']} × {plan['device']['value']}",
        f"Loss       {first:.3f} → {last:.3f} bits per {unit}{validation}",
        f"Speed      {s['tokens_per_s']:,.0f} tokens/s, {s['step_ms']:.1f} ms per step (medians)",
    ]
    if s.get("sample"):
        body = s["sample"].rstrip().splitlines()[:12]
        lines += ["Sample", *(f"    │ {line[:100]}" for line in body)]
    lines += [
        f"Run        {run.path}",
        f"           {_contents(run, s['checkpoint'])}",
        f"Log        {plan['log_file']}" if plan.get("log_file") else "",
        f"See it     ./monitor_training.sh --run={shlex.quote(run.name if _default_place(plan) else str(run.path))}",
        f"Go on      {next_command(plan, run, **more)}",
    ]
    return "\n".join(f"  {line}" for line in lines if line) + "\n"


def _when(s: dict[str, Any]) -> str:
    """How long; of a resumed run the time is that of its last part."""
    begun = s.get("begun_at", 0)
    if begun >= s["steps"]:
        return ", all of them before this start"
    part = f", steps {begun + 1} to {s['steps']}" if begun else ""
    return f"{part} in {_duration(s['seconds'])}"


def _contents(run: rundir.RunDir, checkpoint: str) -> str:
    parts = {run.plan: "", run.metrics: "", run.checkpoints / checkpoint: "", run.tensorboard: "/", run.path / "wandb": "/", run.ranks: "/"}
    return ", ".join(f"{path.relative_to(run.path)}{slash}" for path, slash in parts.items() if path.exists())


def _default_place(plan: dict[str, Any]) -> bool:
    return bool(plan["origins"]["out_dir"] == "default")


def longer(config: dict[str, Any], steps: int) -> dict[str, int]:
    """The limits that end this run, doubled."""
    limits = {name: 2 * config[name] for name in ("num_iterations", "num_epochs") if config[name]}
    return limits or {"num_iterations": 2 * steps}


def next_command(plan: dict[str, Any], run: rundir.RunDir, **changes: Any) -> str:
    """The command that continues this run: a resumed run keeps its own configuration, so it is short."""
    script = plan["command"]["script"]
    program = {"launch_train.sh": f"./launch_train.sh {plan['ranks']}", "train.py": "python train.py"}.get(script, f"./{script}")
    if script == "train.py" and plan["ranks"] > 1:
        program = f"torchrun --nproc_per_node={plan['ranks']} train.py"
    kept = {n: plan["config"][n] for n in ("out_dir", "log_dir") if plan["origins"][n] != "default"}
    flags = kept | {"resume": run.name} | changes
    return " ".join([program, *(f"--{name}={shlex.quote(str(value))}" for name, value in flags.items())])


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
