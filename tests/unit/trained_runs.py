"""Trained runs for tests: the stored one of an earlier version, and small ones made here."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.conftest import ROOT
from training.core import manifest, rundir
from training.tasks.gpt import trained
from training.tasks.gpt.model import GPT
from training.tasks.gpt.model_dims import ModelDims
from training.tasks.trained import TextStep
from training.tasks.weights import Weights

STORED = ROOT / "tests/fixtures/runs/schema_1.tar.xz"


def stored(folder: Path) -> rundir.RunDir:
    """The run `tiny` of schema version 1, in `folder`."""
    with tarfile.open(STORED) as archive:
        archive.extractall(folder, filter="data")
    return rundir.RunDir(folder / "tiny")


def gpt(
    depth: int = 2, vocab: int = 320, length: int = 16, seed: int = 0, key_offset: bool = True
) -> GPT:
    """Without the zero initial weights, which hide errors."""
    torch.manual_seed(seed)
    model = GPT(ModelDims(depth, vocab, length, key_offset))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def made(folder: Path, model: GPT, tokenizer: Path | None = None, step: int = 7) -> rundir.RunDir:
    """A run with one checkpoint of this model. `tokenizer`: its file; None: bytes."""
    run = rundir.RunDir(folder)
    run.create()
    plan: dict[str, Any] = json.loads((stored(folder / "stored").plan).read_text())
    plan["config"] |= {
        name: getattr(model.shape, name) for name in ("depth", "max_seq_len", "key_offset")
    }
    rundir.write_json(run.plan, plan)
    if tokenizer:
        run.tokenizer.mkdir()
        (run.tokenizer / tokenizer.name).write_bytes(tokenizer.read_bytes())
    checkpoint(run, model.state_dict(), asdict(model.shape), step, tokenizer)
    return run


def checkpoint(
    run: rundir.RunDir,
    state: dict[str, torch.Tensor],
    shape: dict[str, Any],
    step: int,
    tokenizer: Path | None = None,
) -> Path:
    place = run.checkpoints / manifest.folder_name(step)
    place.mkdir()
    torch.save({"model": state, "optimizer": {}}, place / manifest.STATE)
    manifest.write(
        place,
        {
            "step": step,
            "epoch": 0,
            "used": 0,
            "shape": shape,
            "optimizer": "muon",
            "world_size": 1,
            "data": {},
            "tokenizer": manifest.sha256(tokenizer) if tokenizer else "bytes",
            "bytes": (place / manifest.STATE).stat().st_size,
            "sha256": manifest.sha256(place / manifest.STATE),
        },
    )
    return place


def on_fake_gpu(monkeypatch: pytest.MonkeyPatch, full_at: int) -> None:
    """A GPU that computes on the CPU, and lacks memory to use the checkpoint of step `full_at`."""

    class OnGpu(trained.TrainedGpt):
        def __init__(
            self, weights: Weights, state: Mapping[str, torch.Tensor], device: torch.device
        ) -> None:
            super().__init__(weights, state, torch.device("cpu"))
            self.device = device

        def evaluate(self, *given: Any) -> dict[str, float]:
            self._compute()
            return super().evaluate(*given)

        def stream(self, *given: Any) -> Iterator[TextStep]:
            self._compute()
            yield from super().stream(*given)

        def _compute(self) -> None:
            if self.device.type == "cuda" and self.weights.step == full_at:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            self.device = torch.device("cpu")

    monkeypatch.setattr(trained, "TrainedGpt", OnGpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
