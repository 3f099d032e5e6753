"""Weights that a training starts from: of a checkpoint, or of --init_from."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from training import tasks
from training.config.schema import FIELDS, Config
from training.core import checkpoint_folder, heartbeat, log, manifest, rundir, units
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.inspector.distributed import World, from_main
from training.plan import init_from as planned
from training.tasks import gpu_error, module_versions, optim, own_error, own_modules, trained
from training.trainer import checkpoint
from training.trainer.weight_average import WeightAverage

if TYPE_CHECKING:
    from training.core.contracts.plan import InitRecord, Plan
    from training.core.contracts.run_files import ManifestRecord
    from training.tasks.spec import TaskSpec

SAME_STATE = {"Adam", "AdamW"}


def load(
    raw: torch.nn.Module,
    optimizer: optim.Optimizers,
    loaded: checkpoint.LoadedCheckpoint,
    facts: ManifestRecord,
) -> bool:
    """Load a checkpoint. `facts`: those of this run's checkpoints. Returns whether the optimizer
    has the saved state; that of a user's task, which may have changed, begins without it if it does
    not fit. Raises UserError if the checkpoint is of another model or optimizer, RuntimeError for
    the GPU, and errors of the model's own methods."""
    with _refused(loaded, _other_model):
        raw.load_state_dict(loaded.state["model"])
    state = loaded.state["optimizer"]
    if state is None:
        return False
    if "task_sha256" in facts and (_other_kind(loaded, facts) or not optimizer.fits(state)):
        return False
    with _refused(loaded, _other_optimizer):
        optimizer.load_state_dict(state)
    return True


@contextmanager
def _refused(
    loaded: checkpoint.LoadedCheckpoint,
    answer: Callable[[checkpoint.LoadedCheckpoint, Exception], UserError],
) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if gpu_error.of_gpu(error) or own_error.in_loading(error):
            raise
        raise answer(loaded, error) from error


def weight_average(
    raw: torch.nn.Module, config: Config, loaded: checkpoint.LoadedCheckpoint | None
) -> WeightAverage | None:
    """The average of --ema, from the checkpoint or else from the current weights, which DDP has
    made equal on all ranks. Raises UserError."""
    if not config.ema:
        return None
    average = WeightAverage(raw, config.ema)
    if loaded and trained.AVERAGE in loaded.state:
        try:
            average.load_state_dict(loaded.state[trained.AVERAGE])
        except ValueError as error:
            raise _other_model(loaded, error) from error
    return average


def init_from(raw: torch.nn.Module, plan: Plan, run: rundir.RunDir, world: World) -> None:
    """Load the weights of --init_from on rank 0; DDP copies its tensors to the others. Raises
    UserError if they are lost, damaged or of another model, RuntimeError for the GPU, and errors of
    the model's own methods."""
    if world.rank == 0:
        planned.check_file(plan, run)
        _load(raw, plan["init_from"], tasks.spec_of(plan))
    _share_extra_states(raw, world)


def _load(raw: torch.nn.Module, start: InitRecord, spec: TaskSpec) -> None:
    file = Path(start["file"])
    size, checksum = start["bytes"], start["sha256"]
    if size is not None and checksum is not None:  # else it is a file of another program
        wrong = manifest.damage(file, size, checksum, heartbeat.current.again)
        if wrong:
            raise trained.unreadable(file, wrong)
    found: Mapping[str, torch.Tensor] = {}
    try:
        found = trained.tensors(file, averaged=start.get("averaged", False))
        raw.load_state_dict(trained.fitted(found, raw.state_dict()))
    except RuntimeError as error:
        if gpu_error.of_gpu(error) or own_error.in_loading(error):
            raise
        reasons = " ".join(str(error).split())[:600]
        theirs, own = (spec.sizes_in(_shapes(t)) for t in (found, raw.state_dict()))
        other = {n: size for n, size in theirs.items() if own.get(n, size) != size}
        if other:
            reasons = ", ".join(
                msg("trainer.state.other_size", name=n, theirs=size, own=own[n])
                for n, size in other.items()
            )
        what = msg("trainer.state.other_weights", title=start["title"], reasons=reasons)
        fixes = [f"--{n}={size}" for n, size in other.items() if n in FIELDS]
        allowed = msg("tasks.spec.same_model")
        raise UserError(Problem("init.differs", what, allowed, fixes)) from None
    log.info(msg("trainer.state.starts_from", title=start["title"]))


def _shapes(tensors: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    return {n: tuple(t.shape) for n, t in tensors.items() if isinstance(t, torch.Tensor)}


def _share_extra_states(raw: torch.nn.Module, world: World) -> None:
    """Those of rank 0 on every rank: DDP copies tensors only."""
    if world.world_size == 1 or not any(map(trained.is_extra, raw.state_dict())):
        return
    sent = None
    if world.rank == 0:
        file = io.BytesIO()
        own = raw.state_dict()
        extra = {name: state for name, state in own.items() if trained.is_extra(name)}
        torch.save(module_versions.added(extra, module_versions.of(own)), file)
        sent = base64.b64encode(file.getvalue()).decode()
    found = base64.b64decode(from_main("extra_states", sent, heartbeat.current.again))
    if world.rank != 0:
        state = torch.load(io.BytesIO(found), map_location="cpu", weights_only=True)
        raw.load_state_dict(state, strict=False)  # the rest is unchanged


def kind_of(optimizer: optim.Optimizers) -> ManifestRecord:
    kind = type(optimizer.parts[0])
    return {"optimizer": kind.__name__, "optimizer_package": own_modules.package_of(kind)}


def _other_kind(loaded: checkpoint.LoadedCheckpoint, facts: ManifestRecord) -> bool:
    """Whether the task has another kind of optimizer by now: most ignore each other's state or fail
    with it, as those of the same name in two packages do. Code that is in no package may be a copy
    of one, but not of torch."""
    both = (loaded.manifest, facts)
    packages = {one["optimizer_package"] for one in both if "optimizer_package" in one}
    if len(packages) > 1 and ("" not in packages or "torch" in packages):
        return True
    kinds = {one["optimizer"] for one in both}
    return len(kinds) > 1 and not kinds <= SAME_STATE


def report_cut_saves(run: rundir.RunDir, world: World, used: int) -> None:
    """Warn of newer checkpoints than that of step `used` whose save was cut by a kill, before the
    saver removes them."""
    if world.rank != 0:
        return
    for cut in checkpoint_folder.cut_saves(run.checkpoints):
        if cut > used:
            text = msg("trainer.state.cut", cut=cut, used=used)
            log.warning(text)
            run.event("warning", code="warning.checkpoint_skipped", text=text)


def report_resume(
    loaded: checkpoint.LoadedCheckpoint,
    run: rundir.RunDir,
    world: World,
    facts: ManifestRecord,
    plan: Plan,
    *,
    optimizer_continued: bool,
) -> None:
    if world.rank != 0:
        return

    def warn(code: str, text: str) -> None:
        log.warning(text)
        run.event("warning", code=code, text=text)

    saved_ranks, then = loaded.manifest["world_size"], loaded.manifest.get("task_sha256")
    for text in loaded.skipped:
        warn("warning.checkpoint_skipped", msg("trainer.state.skipped", text=text))
    if then and then != facts.get("task_sha256"):
        file, saved = plan["task"]["file"], loaded.path.name
        warn("warning.task_changed", msg("trainer.state.task_changed", file=file, checkpoint=saved))
    if not optimizer_continued:
        warn("warning.optimizer_changed", _without_state(loaded, facts))
    log.info(msg("trainer.state.resumed", name=loaded.path.name, epoch=loaded.position.epoch + 1))
    if saved_ranks != world.world_size:
        by = units.plural(saved_ranks, "rank")
        log.warning(msg("trainer.state.other_ranks", by=by, world_size=world.world_size))
    run.event("resume", step=loaded.position.step, path=str(loaded.path))


def _without_state(loaded: checkpoint.LoadedCheckpoint, facts: ManifestRecord) -> str:
    name, now = loaded.path.name, _kind(facts)
    if _other_kind(loaded, facts):
        then = _kind(loaded.manifest)
        return msg("trainer.state.other_kind", checkpoint=name, then=then, now=now)
    return msg("trainer.state.other_groups", checkpoint=name, now=now)


def _kind(facts: ManifestRecord) -> str:
    package = facts.get("optimizer_package")
    return f"{package}.{facts['optimizer']}" if package else facts["optimizer"]


def _other_optimizer(loaded: checkpoint.LoadedCheckpoint, error: Exception) -> UserError:
    reasons = " ".join(str(error).split())[:300]
    what = msg("trainer.state.other_optimizer", path=loaded.path, error=reasons)
    allowed = msg("trainer.state.same_optimizer")
    return UserError(Problem("resume.other_optimizer", what, allowed))


def _other_model(loaded: checkpoint.LoadedCheckpoint, error: Exception) -> UserError:
    reasons = " ".join(str(error).split())[:300]
    what = msg("trainer.state.other_model", path=loaded.path, error=reasons)
    return UserError(Problem("resume.other_model", what, msg("trainer.state.same_model")))
