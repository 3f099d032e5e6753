"""The first and the last words of rank 0: the set-up banner, the sample and summary.json."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from training import heartbeat, rundir
from training.distributed import World
from training.engine.checkpoint import Position
from training.engine.session import Session
from training.errors import Exit

TEMPERATURE = 0.8


def banner(world: World, session: Session, wandb: str) -> str:
    """The 'Distributed Training Setup' block."""
    facts = {
        "Backend": world.backend,
        "World size": world.world_size,
        "Rank / local rank": f"{world.rank} / {world.local_rank}",
        "Master": world.master,
        "Device": f"{world.device} ({_hardware(world.device)})",
        "Model": f"depth {session.config.depth}, {session.parameters / 1e6:.2f} M parameters",
        "Batch": session.batch.sentence(),
        "Steps": f"{session.length.total_steps} ({session.length.steps_per_epoch} per epoch)",
        "W&B": wandb,
    }
    width = max(map(len, facts))
    rule = "─" * 24
    title = f"── Distributed Training Setup {rule}"
    return "\n".join([title, *(f"   {name:<{width}}  {value}" for name, value in facts.items()), "─" * len(title)]) + "\n"


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{threads} thread{'s' if threads > 1 else ''} per rank"


def write_summary(session: Session, plan: dict[str, Any], position: Position, code: Exit, started: float) -> None:
    """summary.json: figures from the recorded metrics (all parts of a resumed run), and generated text."""
    steps: dict[int, dict[str, Any]] = {}
    evals: dict[int, dict[str, Any]] = {}
    for record in rundir.read_records(session.run.metrics):
        if record["step"] > position.step:
            continue  # of a part that a resume has given up
        (evals if "val_bpb" in record else steps)[record["step"]] = record  # after a resume the last one counts
    first, last = steps[min(steps)], steps[max(steps)]
    recent = [r for _, r in sorted(steps.items())][1:] or [first]  # the first step pays for warm-up
    text = sample(session) if code == Exit.DONE and session.config.sample_tokens else None
    rundir.write_json(
        session.run.summary,
        {
            "status": "done" if code == Exit.DONE else "stopped",
            "exit_code": int(code),
            "time": time.time(),
            "seconds": time.time() - started,  # since begun_at
            "begun_at": session.position.step,
            "steps": position.step,
            "tokens": position.tokens,
            "parameters": session.parameters,
            "loss_first": first["loss"],
            "loss_last": last["loss"],
            "val_bpb_first": evals[min(evals)]["val_bpb"] if evals else None,
            "val_bpb_last": evals[max(evals)]["val_bpb"] if evals else None,
            "tokens_per_s": statistics.median(r["tokens_per_s"] for r in recent),
            "step_ms": statistics.median(r["step_ms"] for r in recent),
            "checkpoint": f"step_{position.step:08d}",
            "sample": text,
        },
    )
    session.run.event("end", step=position.step, exit_code=int(code))


def sample(session: Session) -> str:
    """Text that the model writes by itself, the same for the same weights and seed."""
    session.raw.eval()
    generator = torch.Generator().manual_seed(session.config.seed)
    with session.autocast:
        tokens = session.raw.generate(
            [session.tokenizer.bos], session.config.sample_tokens, TEMPERATURE, generator, lambda: heartbeat.current.beat("sample")
        )
    return session.tokenizer.decode(tokens)
