"""Effect of gradients in bf16 between ranks (`--gradient_compression=bf16`): on the mean gradient,
and on the loss of whole runs.

    python -m benchmarks.compression [--seeds=1,2,3] [--steps=300] [--precision=fp32]

The runs are quickstarts with two CPU ranks (gloo), depth 2, Muon; both settings see the same data
from the same weights. Losses do not depend on the machine's speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

import torch

from benchmarks.common import ROOT, environment

SETTINGS = ("none", "bf16")
QUICKSTART = "configs/dual_gpu/quickstart.py"
LAST = 50  # steps whose training loss is averaged
RANKS = (2, 3, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--precision", default="fp32")
    chosen = parser.parse_args()
    print("relative error of the mean gradient (RMS, values over four decades)")
    print(
        "| ranks | torch's bf16_compress_hook | divided in fp32, summed in bf16 | summed in fp32 |"
    )
    for ranks in RANKS:
        print(f"| {ranks} | " + " | ".join(f"{e:.2e}" for e in errors(ranks)) + " |")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SETTINGS}
    for seed in chosen.seeds.split(","):
        for name in SETTINGS:
            found[name].append(trained(int(seed), name, chosen.steps, chosen.precision))
            loss, bpb = found[name][-1]
            print(
                f"seed {seed} {name}: loss {loss:.4f}, validation {bpb:.4f} bits/byte", flush=True
            )
    for column, what in enumerate(("loss", "validation bits/byte")):
        gaps = [b[column] - a[column] for a, b in zip(*found.values(), strict=True)]
        spread = statistics.pstdev(one[column] for one in found["none"])
        print(f"{what}: bf16 - none {[f'{g:+.4f}' for g in gaps]}, of seeds ±{spread:.4f}")


def errors(ranks: int, count: int = 1 << 20) -> list[float]:
    """Of three ways to take the mean over ranks whose gradients have a common part."""
    torch.manual_seed(0)

    def values() -> torch.Tensor:
        return torch.randn(count) * torch.exp(2 * torch.randn(count))

    common, half = values(), torch.bfloat16
    gradients = [common + values() for _ in range(ranks)]
    exact = torch.stack(gradients).double().mean(0)

    def summed(parts: list[torch.Tensor]) -> torch.Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.double()

    ways = [
        summed([g.to(half).div_(ranks) for g in gradients]),
        summed([(g / ranks).to(half) for g in gradients]),
        summed([g.to(half).float() for g in gradients]) / ranks,
    ]
    return [float((way - exact).norm() / exact.norm()) for way in ways]


def trained(seed: int, compression: str, steps: int, precision: str) -> tuple[float, float]:
    """(mean training loss of the last steps in nats, validation in bits per byte)"""
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "device": "cpu",
            "seed": seed,
            "precision": precision,
            "gradient_compression": compression,
            "num_iterations": steps,
            "eval_every": steps,
            "sample_tokens": 0,
            "out_dir": folder,
            "log_dir": folder,
            "run_name": "run",
            "report": "false",
            "tensorboard": "false",
        }
        command = ["./launch_train.sh", "2", QUICKSTART, *(f"--{n}={v}" for n, v in flags.items())]
        subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True)
        lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    losses = [r["loss"] for r in records if "loss" in r]
    scores = [r["val_bpb"] for r in records if "val_bpb" in r]
    return statistics.mean(losses[-LAST:]), scores[-1]


if __name__ == "__main__":
    main()
