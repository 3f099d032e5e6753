"""Checkpoints that survive a crash at any instant and are verified when read.

    checkpoints/step_00000200/state.pt       weights, optimizer
                              manifest.json  step, position in the data, sha256 and size of state.pt

Written into a temporary folder, fsynced, renamed: a folder named step_* is whole. A flipped bit is noticed by the
checksum, and the checkpoint before is used.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from training import rundir
from training.engine.model import Shape
from training.errors import Problem, UserError

FORMAT = 1


@dataclass(frozen=True)
class Position:
    """Where training stands: `step` optimizer steps done, `epoch` (0-based) with `epoch_steps` of them done in it."""

    step: int = 0
    epoch: int = 0
    epoch_steps: int = 0


@dataclass
class Loaded:
    position: Position
    state: dict[str, Any]
    path: Path
    skipped: list[str]  # damaged newer checkpoints, with what is wrong


def save(
    folder: Path, position: Position, model: torch.nn.Module, optimizer: torch.optim.Optimizer, facts: dict[str, Any], keep: int
) -> Path:
    """Write a checkpoint and remove the oldest ones. Raises OSError; the earlier checkpoints are then untouched."""
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    content = buffer.getbuffer()
    final = folder / f"step_{position.step:08d}"
    work = Path(tempfile.mkdtemp(dir=folder, prefix=".writing-"))
    try:
        with (work / "state.pt").open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        manifest = {"format": FORMAT, **asdict(position), **facts, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        rundir.write_json(work / "manifest.json", manifest)
        os.chmod(work, 0o755)
        if final.exists():  # the same step after a resume
            shutil.rmtree(final)
        work.rename(final)
        _sync_folder(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    for old in sorted(folder.glob("step_*"))[:-keep]:
        shutil.rmtree(old)
    return final


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def latest(folder: Path) -> Loaded | None:
    """The newest checkpoint that is whole, or None when there is none at all.

    Raises UserError when there are checkpoints but every one is damaged: starting over would hide the loss.
    """
    skipped: list[str] = []
    for path in sorted(folder.glob("step_*"), reverse=True):
        content, wrong = _verified(path)
        if content is None:
            skipped.append(f"{path.name}: {wrong}")
            continue
        manifest = rundir.read_json(path / "manifest.json") or {}
        position = Position(manifest["step"], manifest["epoch"], manifest["epoch_steps"])
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return Loaded(position, state | {"manifest": manifest}, path, skipped)
    if skipped:
        raise UserError(Problem(f"every checkpoint in {folder} is damaged: {'; '.join(skipped)}", "a run with a whole checkpoint"))
    return None


def _verified(path: Path) -> tuple[bytes | None, str]:
    manifest = rundir.read_json(path / "manifest.json")
    if manifest is None or manifest.get("format") != FORMAT:
        return None, "manifest.json is missing or damaged"
    try:
        content = (path / "state.pt").read_bytes()
    except OSError as error:
        return None, f"state.pt can not be read: {error.strerror}"
    if len(content) != manifest["bytes"]:
        return None, f"state.pt has {len(content)} of {manifest['bytes']} bytes"
    if hashlib.sha256(content).hexdigest() != manifest["sha256"]:
        return None, "state.pt does not match its checksum (a flipped bit?)"
    return content, ""


def check_shape(loaded: Loaded, shape: Shape) -> None:
    """Raises UserError when the checkpoint belongs to another model."""
    saved = loaded.state["manifest"]["shape"]
    wanted = asdict(shape)
    different = [f"{k} {saved.get(k)} (now {v})" for k, v in wanted.items() if saved.get(k) != v]
    if different:
        fixes = [f"leave --{k} out: a resumed run keeps its own value" for k in wanted if saved.get(k) != wanted[k] and k != "vocab"]
        raise UserError(Problem(f"checkpoint {loaded.path} is of another model: {', '.join(different)}", "the same model", fixes))
