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
    script, args = plan["command"]["script"], plan["command"]["args"]
    first, last = s["loss_first"] / math.log(2), s["loss_last"] / math.log(2)
    validation = f"; validation {s['val_bpb_first']:.3f} → {s['val_bpb_last']:.3f}" if s.get("val_bpb_last") is not None else ""
    lines = [
        f"Model      GPT, depth {plan['config']['depth']}, {s['parameters'] / 1e6:.2f} M parameters, on {plan['ranks']} × {plan['device']['value']}",
        f"Trained    {s['steps']} steps, {s['tokens'] / 1e6:.2f} M tokens of {plan['data']['name']} in {_duration(s['seconds'])}",
        f"Loss       {first:.3f} → {last:.3f} bits per byte{validation}",
        f"Speed      {s['tokens_per_s']:,.0f} tokens/s, {s['step_ms']:.1f} ms per step (medians)",
    ]
    if s.get("sample"):
        body = [line for line in s["sample"].rstrip().splitlines()][:12]
        lines += ["Sample", *(f"    │ {line[:100]}" for line in body)]
    lines += [
        f"Run        {run.path}",
        f"           plan.json, metrics.jsonl, checkpoints/{s['checkpoint']}, tb_logger/, ranks/*.log",
        f"Log        {plan['log_file']}" if plan.get("log_file") else "",
        f"Next       ./monitor_training.sh --run={shlex.quote(str(run.path))} --once",
        f"           {_longer(script, args, s, run)}",
    ]
    return "\n".join(f"  {line}" for line in lines if line) + "\n"


def _longer(script: str, args: list[str], s: dict[str, Any], run: rundir.RunDir) -> str:
    from training.request import command

    if s["status"] == "stopped":
        return f"{command(script, args, resume=run.name)}   (go on from step {s['steps']})"
    return f"{command(script, args, resume=run.name, num_iterations=2 * s['steps'])}   (train on, twice as long)"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
