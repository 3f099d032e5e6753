"""A trained model as a folder for other programs, written completely or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import training
from training import tasks
from training.config.schema import FIELDS
from training.core import log, manifest, redact, rundir, umask
from training.core.messages import msg
from training.core.work_folder import WorkFolder, sync
from training.tasks import model_card, module_versions, own_error, own_modules, safetensors_file
from training.tasks.trained import Trained
from training.tasks.weights import EXPORT, EXPORT_FORMAT, HUB, SAFETENSORS, TORCH, TORCH_FORM

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.plan import TaskRecord
    from training.core.contracts.run_files import ExportRecord

# Fields that may matter to the model; paths, commands and trackers of the training do not.
GROUPS = ("model", "batch", "optimizer", "compute")
CARD = "README.md"


def write(model: Trained, form: str, out: Path) -> None:
    """Write the model as `form` (one of FORMATS) into the folder `out`, which does not exist or is
    empty. Raises OSError, and UserError for weights that the form cannot hold; then `out` is
    unchanged."""
    folder = WorkFolder(out)
    work = folder.path
    try:
        file = work / (TORCH if form == TORCH_FORM else SAFETENSORS)
        with own_error.reported(model.weights.task_file):  # in get_extra_state()
            own = model.model.state_dict()
            state = module_versions.added(_separate(own), module_versions.of(own))
        if form == TORCH_FORM:
            _save(state, file)
        else:
            safetensors_file.write(file, state)
        words = model.export_files(work, form == HUB)
        rundir.write_json(work / EXPORT, _record(model, work, file, words))
        rundir.write_bytes(work / CARD, model_card.text(model, form).encode())
        for path in work.rglob("*"):
            umask.use(path)
            sync(path)
        umask.use(work)
        sync(work)
        work.rename(out)  # replaces an empty folder
        sync(out.parent)
    finally:
        folder.remove()


def _separate(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, each in memory of its own; only those that share some are copied. Extra states
    and sparse tensors as they are."""
    found: dict[str, torch.Tensor] = {}
    places: set[int] = set()
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            found[name] = tensor
            continue
        one = tensor.detach().cpu().contiguous()
        storage = one.untyped_storage()
        if storage.nbytes() != one.nbytes or storage.data_ptr() in places:
            one = one.clone()
        places.add(storage.data_ptr())
        found[name] = one
    return found


def _save(state: Mapping[str, torch.Tensor], file: Path) -> None:
    """torch.save(). Raises OSError, also where torch raises RuntimeError for a full disk."""
    try:
        torch.save(state, file)
    except RuntimeError as error:
        raise OSError(" ".join(str(error).split())) from None


def _record(model: Trained, folder: Path, file: Path, words: str | None) -> ExportRecord:
    weights = model.weights
    task: TaskRecord = {**tasks.task_of(weights.plan)}
    if file_of_task := weights.task_file:  # the code of a user's task belongs to its weights
        for inner, source in own_modules.files(file_of_task).items():
            (folder / inner).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / inner)
        task["file"] = file_of_task.name
    options, shape = task["options"], weights.facts["shape"]
    task["options"], published_shape = _published(options), _published(shape)
    _warn_of_blanks((options, task["options"]), (shape, published_shape))
    config = {
        name: value
        for name, value in weights.plan["config"].items()
        if name in FIELDS
        and FIELDS[name].metadata["group"] in GROUPS
        and name not in ("task", "init_from", "init_weights")
    }
    record: ExportRecord = {
        "format": EXPORT_FORMAT,
        "duet_version": training.__version__,
        "task": task,
        "config": config,
        "shape": published_shape,
        "tokenizer": words,
        "run": weights.name,
        "step": weights.step,
        "weights": file.name,
        "bytes": file.stat().st_size,
        "sha256": manifest.sha256(file),
    }
    if "precision" in weights.plan:
        record["precision"] = weights.plan["precision"]["value"]
    if "tf32" in weights.plan:
        record["tf32"] = weights.plan["tf32"]["value"]
    if weights.averaged:
        record["ema"] = weights.facts["ema"]
    return record


def _published(values: FieldValues) -> FieldValues:
    """Without secrets, and with `~` for the home folder: reading the export restores that path, and
    no other one."""
    home = os.path.expanduser("~").rstrip("/")  # noqa: PTH111 – Path.home raises without a home
    found = dict(values)
    for name, value in values.items():
        if not isinstance(value, str):
            continue
        if redact.is_surely_secret(name, value):
            found[name] = ""
        elif home and f"{value}/".startswith(f"{home}/"):
            found[name] = f"~{value[len(home) :] or '/'}"
    return found


def _warn_of_blanks(*both: tuple[FieldValues, FieldValues]) -> None:
    """Name the options that are empty as published, but not as they are."""
    blank = {
        name: None
        for values, published in both
        for name, value in published.items()
        if value == "" and values[name] != ""
    }
    if blank:
        log.warning(msg("tasks.export.blank", names=", ".join(blank)))
