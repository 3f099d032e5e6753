"""Trained runs for tests: the stored one of an earlier version, and small ones made here."""

from __future__ import annotations

import json
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.unit.conftest import ROOT
from training.core import manifest, rundir
from training.tasks.gpt.model import GPT
from training.tasks.gpt.model_dims import ModelDims

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


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
