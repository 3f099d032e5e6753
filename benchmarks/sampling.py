"""Tokens per second of generation: Duet's decoder, the same without a cache, and nanochat's engine
on a model of the same depth, width, vocabulary and context.

    [NANOCHAT_DIR=FOLDER] python -m benchmarks.sampling [--depth=4] [--vocab=8192] [--context=512]

Also the time from the start of `./duet sample` to its first token, beside `import torch`. One
thread, random weights, medians of interleaved rounds. NANOCHAT_DIR: a checkout of nanochat.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT, environment
from training.core import manifest, rundir
from training.core.args import parse, whole
from training.core.errors import UserError
from training.tasks.gpt.generate import Sampling, generate
from training.tasks.gpt.model import GPT
from training.tasks.gpt.model_dims import ModelDims

FLAGS = {
    "depth": whole(1, 64, 4),
    "vocab": whole(64, 1 << 20, 8192),
    "context": whole(16, 1 << 16, 512),
    "rounds": whole(1, 100, 5),
}
PROMPT, COUNT, STARTS = 32, 64, 5
Contender = Callable[[int, int], int]  # (samples, tokens) → generated tokens


def duet(model: GPT) -> Contender:
    def run(samples: int, count: int) -> int:
        how = Sampling(count, 1.0, samples=samples, seed=1)
        return sum(len(column) for column in generate(model, list(range(PROMPT)), how))

    return run


def naive(model: GPT) -> Contender:
    @torch.no_grad()
    def run(samples: int, count: int) -> int:
        tokens = torch.arange(PROMPT).expand(samples, -1)
        for _ in range(count):
            chances = torch.softmax(model(tokens)[:, -1], dim=-1)
            tokens = torch.cat((tokens, torch.multinomial(chances, 1)), dim=1)
        return samples * count

    return run


def nanochat(folder: str, shape: ModelDims) -> Contender:
    """Its engine needs only special tokens of a tokenizer; its tokenizer's packages are not
    loaded."""
    sys.path.insert(0, folder)
    words = types.ModuleType("nanochat.tokenizer")
    vars(words)["get_tokenizer"] = None
    sys.modules["nanochat.tokenizer"] = words
    gpt: Any = import_module("nanochat.gpt")
    engine: Any = import_module("nanochat.engine")
    config = gpt.GPTConfig(
        sequence_len=shape.max_seq_len,
        vocab_size=shape.vocab,
        n_layer=shape.depth,
        n_head=shape.heads,
        n_kv_head=shape.heads,
        n_embd=shape.width,
        window_pattern="L",
    )
    model = gpt.GPT(config)
    model.init_weights()
    tokenizer = types.SimpleNamespace(
        encode_special=lambda name: -1, get_bos_token_id=lambda: -1, decode=str
    )
    made = engine.Engine(model.eval(), tokenizer)

    def run(samples: int, count: int) -> int:
        steps: Iterator[Any] = made.generate(
            list(range(PROMPT)), num_samples=samples, max_tokens=count, temperature=1.0
        )
        return sum(len(tokens) for tokens, _ in steps)

    return run


def random_model(shape: ModelDims) -> GPT:
    torch.manual_seed(0)
    model = GPT(shape).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def first_token(model: GPT, folder: Path) -> tuple[float, float]:
    """Median seconds to the first byte of `./duet sample`, and of `import torch`."""
    run = rundir.RunDir(folder / "run")
    run.create()
    task: dict[str, object] = {"name": "gpt", "unit": "tokens", "file": None, "options": {}}
    rundir.write_json(run.plan, {"schema_version": 1, "task": task, "config": {}})
    place = run.checkpoints / manifest.folder_name(1)
    place.mkdir()
    state = place / manifest.STATE
    torch.save({"model": model.state_dict()}, state)
    manifest.write(
        place,
        {
            **{"step": 1, "epoch": 0, "used": 0, "optimizer": "muon", "world_size": 1},  # type: ignore[typeddict-item]
            "shape": asdict(model.shape),
            "data": {},
            "tokenizer": "bytes",
            "bytes": state.stat().st_size,
            "sha256": manifest.sha256(state),
        },
    )
    sampled = [str(ROOT / "duet"), "sample", str(run.path), "--max_tokens=4", "--temperature=0"]
    imported = [sys.executable, "-c", "import torch; print(1)"]
    times: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(STARTS):
        for number, argv in enumerate((sampled, imported)):
            begun = time.perf_counter()
            with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment()) as process:
                assert process.stdout and process.stdout.read(1), "no token"
                times[number].append(time.perf_counter() - begun)
                process.stdout.read()
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    line = parse(sys.argv[1:], FLAGS, "python -m benchmarks.sampling")
    if line.problems or line.words:
        raise UserError(line.problems) if line.problems else SystemExit(__doc__)
    chosen = {"depth": 4, "vocab": 8192, "context": 512, "rounds": 5} | line.values
    torch.set_num_threads(1)
    shape = ModelDims(chosen["depth"], chosen["vocab"], chosen["context"])
    model = random_model(shape)
    contenders = {"Duet": duet(model), "without a cache": naive(model)}
    if folder := os.environ.get("NANOCHAT_DIR"):
        contenders["nanochat"] = nanochat(folder, shape)
    print(f"depth {shape.depth}, width {shape.width}, vocabulary {shape.vocab}, CPU, one thread")
    print(f"{PROMPT} + {COUNT} tokens, tokens/s, medians of {chosen['rounds']} rounds")
    for samples in (1, 8):
        speeds: dict[str, list[float]] = {name: [] for name in contenders}
        for run in contenders.values():
            run(samples, 8)
        for _ in range(chosen["rounds"]):
            for name, run in contenders.items():
                begun = time.perf_counter()
                speeds[name].append(run(samples, COUNT) / (time.perf_counter() - begun))
        for name, found in speeds.items():
            spread = f"{min(found):,.0f}–{max(found):,.0f}"
            print(f"{samples} × {name:<16} {statistics.median(found):>8,.0f}   {spread}")
    with tempfile.TemporaryDirectory() as place:
        total, torch_alone = first_token(random_model(ModelDims(4, 320, 128)), Path(place))
    print(f"first token after {total:.2f} s, of which import torch {torch_alone:.2f} s")


if __name__ == "__main__":
    main()
