"""Peak memory of a training step: measured, by the formula of the plan, and by fake tensors.

    python -m benchmarks.memory [--compile]

Each shape runs in a separate process, steps on one rank that accumulates: with gradients in memory
before a forward pass, as those in DDP's buckets. On
a GPU the measured value is torch's peak of allocated memory; on a CPU, the peak of resident memory
above that of the same process after a tiny step, with malloc set to return large blocks at once.
`--compile` adds the compiled step (half a minute each on a CPU).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from training.core.units import GIB
from training.tasks.gpt.memory import StepWorkload, estimate

ROOT = Path(__file__).resolve().parent.parent
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "OMP_NUM_THREADS": "2"}
SMALL = StepWorkload(  # about 1 GiB
    6, 8, 512, 320, bf16=False, compiled=False, cuda=False, total_tokens=2 * 8 * 512
)
# configs/dual_gpu/conservative.py on one rank
LARGE = StepWorkload(12, 8, 1536, 320, bf16=True, compiled=False, total_tokens=2 * 8 * 1536)
WAYS = {
    "plain": {},
    "6 blocks recomputed": {"blocks": 6},
    "4 blocks recomputed": {"blocks": 4},
    "6 blocks selectively": {"selective": 6},
    "vocabulary 16384": {"vocab": 16384},
    "… loss in 8 parts": {"vocab": 16384, "chunks": 8},
    "… and all blocks recomputed": {"vocab": 16384, "chunks": 8, "blocks": 6},
}


def shapes(on_gpu: bool, compiled: bool) -> dict[str, StepWorkload]:
    out = {}
    for base in [LARGE] if on_gpu else [SMALL, replace(SMALL, bf16=True)]:
        for how in (False, True) if compiled or on_gpu else (False,):
            for name, change in WAYS.items():
                scaled = {
                    k: v * base.depth // 6 if k in ("blocks", "selective") else v
                    for k, v in change.items()
                }
                title = f"{'bf16' if base.bf16 else 'fp32'} {'compiled' if how else 'eager'}"
                out[f"{title}, {name}"] = replace(base, compiled=how, **scaled)  # type: ignore[arg-type]  # numbers only
    return out


def real_peak(load: StepWorkload) -> int:
    """Peak bytes of this process; call it in a fresh one."""
    steps(replace(load, depth=1, sequences=1, seq_len=16, blocks=0, chunks=1), 2)
    gc.collect()
    if load.cuda:
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        steps(load, 3)
        return torch.cuda.max_memory_allocated() - before
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here
    steps(load, 3)
    return resident("VmHWM") - before


def resident(what: str) -> int:
    line = next(
        row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(what)
    )
    return int(line.split()[1]) * 1024


def steps(load: StepWorkload, count: int) -> None:
    """Training steps as in training/trainer, with random tokens. Of micro-batches that are
    accumulated only one runs, with the gradients of the one before."""
    import torch

    from training.config.schema import Config
    from training.tasks.gpt import optim as gpt_optim
    from training.tasks.gpt.fake_memory import half_precision
    from training.tasks.gpt.model import GPT, MemorySavings
    from training.tasks.gpt.model_dims import ModelDims, blocks_per_graph

    device = "cuda" if load.cuda else "cpu"
    model = GPT(
        ModelDims(load.depth, load.vocab, load.seq_len),
        MemorySavings(load.blocks, load.chunks, load.selective),
        load.dropout,
    ).to(device)
    optimizer = gpt_optim.build(model, Config(optimizer="muon" if load.muon else "adamw"))
    if load.compiled:
        model.compile_parts(blocks_per_graph(device, load.ranks))
    tokens = torch.randint(0, min(load.vocab, 256), (load.sequences, load.seq_len), device=device)
    if load.holds_gradients:
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
    for _ in range(count):
        with torch.autocast(device, half_precision(load), enabled=load.bf16):
            loss = model(tokens, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not load.holds_gradients:
            optimizer.zero_grad()
            continue
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad.zero_()


def fresh(load: StepWorkload) -> int:
    """real_peak in a separate process. Raises CalledProcessError."""
    code = (
        "import json, sys; from benchmarks.memory import StepWorkload, real_peak; "
        "print(real_peak(StepWorkload(**json.loads(sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(asdict(load))],
        cwd=ROOT,
        env=os.environ | MALLOC,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return int(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--compile", action="store_true", help="also the compiled step (always on a GPU)"
    )
    compiled = parser.parse_args().compile
    import torch

    from training.tasks.gpt.fake_memory import peak

    print(f"{'':<38}{'real':>10}{'formula':>10}{'ratio':>7}{'fake':>10}{'ratio':>7}")
    for name, load in tqdm(
        shapes(torch.cuda.is_available(), compiled).items(), unit="shape", disable=None
    ):
        try:
            real = fresh(load)
        except subprocess.CalledProcessError as error:  # too large for this GPU
            tqdm.write(f"{name:<38}not measured: exit status {error.returncode}")
            continue
        formula = estimate(load)
        planned, fake = formula.total - formula.context, None if load.compiled else peak(load)
        seen = "" if fake is None else f"{fake / GIB:6.2f} GiB{fake / real:7.2f}"
        sizes = f"{real / GIB:6.2f} GiB{planned / GIB:6.2f} GiB{planned / real:7.2f}"
        tqdm.write(f"{name:<38}{sizes}{seen}")


if __name__ == "__main__":
    main()
