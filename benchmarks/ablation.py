"""Ablation of model, optimizer and schedule: validation loss after the same number of steps without
each choice.

    python -m benchmarks.ablation [--only=muon,qk_norm] [--steps=300] [--seeds=1,2] [--jobs=2]

Each row of the table changes one thing; everything else is as in training.trainer. Depth 4 (width
256), 8 × 256 tokens per step (`--sequences`), the embedded corpus, bf16, one thread. Losses do not
depend on the machine's speed, so runs may share it; `ms` is the processor time of a step. A
complete run is a file in `--results`, which is not repeated: delete it when Duet's model or
optimizer has changed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import muon_variants
from benchmarks.common import ROOT, environment, prepared, warn_of_emulation
from benchmarks.gpu.machine import commit
from benchmarks.muon import Fp32Muon
from benchmarks.muon_variants import Ideas
from benchmarks.variants import Choices, Variant
from training.config.batch import Batch
from training.config.schema import Config
from training.core.jsonl import read_figures
from training.core.rundir import write_json
from training.data.loader import Batches
from training.data.token_dataset import dataset, pair
from training.data.tokenizer import for_corpus
from training.tasks import optim
from training.tasks.gpt import optim as gpt_optim
from training.tasks.gpt.model_dims import ModelDims
from training.tasks.gpt.rates import MATRIX_LR

DEPTH, LENGTH, SEQUENCES = 4, 256, 8
VALIDATION = 512  # sequences
SIZES = ("steps", "depth", "precision", "sequences")  # flags that a result depends on
OUT = ROOT / "experiments/ablation"


@dataclass(frozen=True)
class Change:
    """One difference from Duet's defaults."""

    what: str
    model: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    momentum_steps: int = optim.MOMENTUM_STEPS
    betas: tuple[float, float] = gpt_optim.BETAS
    newton_schulz: int = 5
    muon: Ideas = field(default_factory=Ideas)
    embedding_beta2: float = gpt_optim.BETAS[1]


ADAMW = {"optimizer": "adamw", "weight_decay": 0.1, "embedding_lr": 0.05, "unembedding_lr": 0.015}
CHANGES = {
    "duet": Change("Duet's defaults"),
    "adamw": Change("AdamW for the matrices too, with tuned rates", config=ADAMW),
    "merged_qkv": Change("query, key and value as one matrix for Muon", {"separate_qkv": False}),
    "no_key_offset": Change("keys of their own token only", {"key_offset": False}),
    "no_momentum_warmup": Change("Muon's momentum 0.95 from the start", momentum_steps=1),
    "ns4": Change("4 Newton-Schulz iterations, not 5", newton_schulz=4),
    "ns3": Change("3 Newton-Schulz iterations, not 5", newton_schulz=3),
    "matrix_lr_half": Change("matrix rate × 1/2", config={"matrix_lr": MATRIX_LR["muon"] / 2}),
    "matrix_lr_double": Change("matrix rate × 2", config={"matrix_lr": MATRIX_LR["muon"] * 2}),
    "embedding_lr_half": Change(
        "embedding rate × 1/2", config={"embedding_lr": Config.embedding_lr / 2}
    ),
    "embedding_lr_double": Change(
        "embedding rate × 2", config={"embedding_lr": Config.embedding_lr * 2}
    ),
    "unembedding_lr_half": Change(
        "head rate × 1/2", config={"unembedding_lr": Config.unembedding_lr / 2}
    ),
    "unembedding_lr_double": Change(
        "head rate × 2", config={"unembedding_lr": Config.unembedding_lr * 2}
    ),
    "weight_decay": Change("weight decay 0.1", config={"weight_decay": 0.1}),
    "beta1_0.9": Change("AdamW's first beta 0.9", betas=(0.9, 0.95)),
    "no_warmup": Change("no warm-up", config={"warmup_ratio": 0.0}),
    "warmup_5": Change("warm-up of 5 %", config={"warmup_ratio": 0.05}),
    "decay_40": Change("decay in the last 40 %", config={"warmdown_ratio": 0.4}),
    "decay_98": Change("decay from the start", config={"warmdown_ratio": 0.98}),
    "final_0": Change("decay to 0", config={"final_lr_frac": 0.0}),
    "no_clip": Change("no gradient clipping", config={"grad_clip": 0.0}),
    "no_qk_norm": Change("no QK-norm", {"qk_norm": False}),
    "learned_positions": Change("learned positions, not rotary", {"positions": "learned"}),
    "layer_norm": Change("LayerNorm, not RMSNorm", {"layer_norm": True}),
    "relu2": Change("squared ReLU, not SwiGLU", {"mlp": "relu2"}),
    "gelu": Change("GELU, not SwiGLU", {"mlp": "gelu"}),
    "tied": Change("embedding and head share their weights", {"tied": True}),
    "gpt2_init": Change(
        "GPT-2's initial weights, not zero-initialized projections", {"gpt2_init": True}
    ),
    "head_dim_64": Change("heads of 64, not 128", {"head_dim": 64}),
    "no_softcap": Change("no soft-cap of the logits", {"softcap": 0.0}),
    "z_loss": Change("z-loss of 1e-4 added", {"z_loss": 1e-4}),
    "input_mixing": Change("blocks also get the embedding", {"input_mixing": True}),
    "value_embedding": Change(
        "values get a token vector in every other block", {"value_embedding": True}
    ),
    # Ideas of nanochat (2026-07).
    "value_gate": Change("value embeddings with gates", {"value_gate": True}),
    "smear": Change("gated share of the embedding before", {"smear": True}),
    "backout": Change("the middle of the stream is subtracted", {"backout": True}),
    "scaled_stream": Change("blocks scale the stream, add the embedding", {"scaled_stream": True}),
    "attention_1.2": Change("queries and keys × 1.2", {"attention_scale": 1.2}),
    "inner_0.4": Change("first MLP layer's initial weights × 0.4", {"inner_scale": 0.4}),
    "rope_100k": Change("rotary base of 100,000", {"rope_base": 1e5}),
    "fp32_stream": Change("residual stream in fp32 under bf16 autocast", {"fp32_stream": True}),
    "embedding_beta2": Change("the embedding's second beta 0.995", embedding_beta2=0.995),
    "polar_express": Change("Polar Express iteration", muon=Ideas(polar_express=5)),
    "polar_express_4": Change("Polar Express, 4 iterations", muon=Ideas(polar_express=4)),
    "equal_rows": Change("MuonEq: rows of equal norm", muon=Ideas(equal_rows=True)),
    "exact_norm": Change("Muon+: exact norm", muon=Ideas(exact_norm=True)),
    "variance_reduction": Change("NorMuon", muon=Ideas(variance_reduction=True)),
    "cautious_decay": Change(
        "cautious decay of 0.1", muon=Ideas(cautious_decay=True), config={"weight_decay": 0.1}
    ),
    "smear_backout": Change("smear and backout", {"smear": True, "backout": True}),
    "four_together": Change(
        "smear, backout, NorMuon and cautious decay of 0.1",
        {"smear": True, "backout": True},
        muon=Ideas(variance_reduction=True, cautious_decay=True),
        config={"weight_decay": 0.1},
    ),
    "nanochat_muon": Change(
        "Polar Express, MuonEq, Muon+ and NorMuon", muon=Ideas(5, True, True, True)
    ),
}


def build(model: Variant, change: Change, config: Config, bf16: bool) -> optim.Optimizers:
    """training.tasks.gpt.optim.build for the parameters of a variant. `bf16`: of Muon's iteration,
    with an idea or without."""
    matrices, scale = model.matrices, (model.shape.width / gpt_optim.REFERENCE_WIDTH) ** -0.5
    rate = MATRIX_LR[config.optimizer] if isinstance(config.matrix_lr, str) else config.matrix_lr
    embedding_betas = (change.betas[0], change.embedding_beta2)
    own: list[dict[str, Any]] = [  # with nanochat's rates
        {"params": model.named("values.weight"), "lr": config.embedding_lr * scale / 2}
        | {"betas": embedding_betas},
        {"params": model.named("smear_gate.weight", "smear_share", "backout"), "lr": 0.2},
        {"params": model.named("stream_scale"), "lr": 0.005},
        {"params": model.named("start_share"), "lr": 0.5, "betas": (0.96, 0.95)},
    ]
    taken = {id(p) for group in own for p in group["params"]}
    taken |= {id(p) for p in [*matrices, model.head.weight]}
    rest = [p for p in model.parameters() if id(p) not in taken]
    groups: list[dict[str, Any]] = [
        {"params": rest, "lr": config.embedding_lr * scale, "betas": embedding_betas},
        *(group for group in own if group["params"]),
    ]
    for group in groups:
        group["weight_decay"] = 0.0
    groups.append(
        {"params": [model.head.weight], "lr": config.unembedding_lr * scale, "weight_decay": 0.0}
    )
    first: list[torch.optim.Optimizer] = []
    decay = config.weight_decay
    if change.muon.any:
        dtype = torch.bfloat16 if bf16 else torch.float32
        first.append(muon_variants.Muon(matrices, rate, decay, change.muon, dtype))
    elif config.optimizer == "muon":
        make = torch.optim.Muon if bf16 else Fp32Muon
        first.append(make(matrices, rate, decay, ns_steps=change.newton_schulz))
    else:
        groups.insert(0, {"params": matrices, "lr": rate * scale, "weight_decay": decay})
    return optim.Optimizers(
        [*first, torch.optim.AdamW(groups, betas=change.betas, eps=gpt_optim.EPSILON, fused=True)]
    )


def run(name: str, steps: int, seed: int, depth: int, bf16: bool, sequences: int) -> dict[str, Any]:
    """Train one variant in this process. `sequences`: of a step."""
    change = CHANGES[name]
    config = Config(
        **{"depth": depth, "max_seq_len": LENGTH, "device_batch_size": sequences, "seed": seed}
        | change.config
    )
    optim.MOMENTUM_STEPS = change.momentum_steps
    torch.manual_seed(seed)
    data = prepared()
    model = Variant(ModelDims(depth, data.vocab, LENGTH), Choices(**change.model))
    optimizer = build(model, change, config, bf16)
    batch = Batch(sequences, LENGTH, 1, 1)
    train = dataset(data, "train", LENGTH)
    batches = Batches(
        train, batch, rank=0, seed=seed, workers=0, persistent=False, arrive=pair
    ).epoch(0, 0)
    autocast, times = torch.autocast("cpu", torch.bfloat16, enabled=bf16), []
    for step in range(steps):
        started = time.process_time()
        optimizer.schedule(step, optim.multiplier(step, steps, config))
        with autocast:
            loss = model(*next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time() - started)
    model.eval()
    validation, bos = dataset(data, "val", LENGTH), for_corpus(data).bos
    nats = tokens = 0.0
    with torch.no_grad(), autocast:
        for start in range(0, min(VALIDATION, len(validation)), SEQUENCES):
            inputs, targets = validation.batch(range(start, start + SEQUENCES))
            targets = targets.masked_fill(targets == bos, -1)
            counted = int((targets != -1).sum())
            nats, tokens = nats + float(model(inputs, targets)) * counted, tokens + counted
    return {
        "bpb": nats / tokens / math.log(2),
        "ms": statistics.median(times) * 1000,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


Found = dict[str, dict[int, dict[str, Any]]]  # results by name and seed


def table(found: Found) -> list[str]:
    """Changes are means over the seeds that both have, with their range."""
    base = found["duet"]
    lines = [
        f"{'variant':<20}{'bits/byte':>10}{'change':>9}{'range':>18}{'M weights':>11}{'ms':>7}"
        "   difference"
    ]
    for name, own in found.items():
        if not (seeds := sorted(own.keys() & base.keys())):
            continue
        bpb = statistics.mean(own[seed]["bpb"] for seed in seeds)
        changes = [own[seed]["bpb"] - base[seed]["bpb"] for seed in seeds]
        ms = statistics.median(one["ms"] for one in own.values())
        lines.append(
            f"{name:<20}{bpb:10.4f}{statistics.mean(changes):+9.4f}"
            f"{min(changes):+10.4f}{max(changes):+8.4f}{own[seeds[0]]['parameters'] / 1e6:11.2f}"
            f"{ms:7.0f}   {CHANGES[name].what}"
        )
    return lines


def child(args: argparse.Namespace, name: str, seed: int) -> dict[str, Any] | None:
    """The kept result, or a process's."""
    kind = f"depth{args.depth}-{args.precision}-{args.steps}x{args.sequences}"
    kept: Path = args.results / f"{name}-{kind}-seed{seed}.json"
    if (before := read_figures(kept)) is not None:  # bpb may be NaN
        return before
    argv = [sys.executable, "-m", "benchmarks.ablation", f"--one={name}", f"--seeds={seed}"]
    argv += [f"--{flag}={getattr(args, flag)}" for flag in SIZES]
    done = subprocess.run(
        argv, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        tqdm.write(f"{name}, seed {seed}: failed:\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    found = dict(json.loads(done.stdout.splitlines()[-1]))
    args.results.mkdir(parents=True, exist_ok=True)
    write_json(kept, {**found, "commit": commit()})
    tqdm.write(f"{name}, seed {seed}: {found['bpb']:.4f}", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(CHANGES), help="names of variants")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--seeds", default="1", help="numbers; all variants have one, then the next"
    )
    parser.add_argument("--jobs", type=int, default=2, help="concurrent runs")
    parser.add_argument("--depth", type=int, default=DEPTH)
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="of a step")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument(
        "--results", type=Path, default=OUT, help="folder with one file for each complete run"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a single run, in this process
    args = parser.parse_args()
    seeds = [int(s) for s in args.seeds.split(",")]
    if args.one:
        bf16 = args.precision == "bf16"
        print(json.dumps(run(args.one, args.steps, seeds[0], args.depth, bf16, args.sequences)))
        return
    names = list(dict.fromkeys(["duet", *args.only.split(",")]))
    if unknown := [n for n in names if n not in CHANGES]:
        sys.exit(f"unknown variant {', '.join(unknown)}; allowed: {', '.join(CHANGES)}")
    prepared()
    warn_of_emulation(args.precision)
    pairs = [(name, seed) for seed in seeds for name in names]
    found: Found = {name: {} for name in names}
    with ThreadPoolExecutor(args.jobs) as pool:
        results = pool.map(lambda pair: child(args, *pair), pairs)
        for (name, seed), one in zip(
            pairs, tqdm(results, total=len(pairs), unit="run", disable=None), strict=True
        ):
            if one:
                found[name][seed] = one
    if not found["duet"]:
        sys.exit("the runs with the defaults failed: nothing to compare with")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
