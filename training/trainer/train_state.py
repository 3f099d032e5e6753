"""State of a training: model, optimizer, data and start position."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from training import tasks
from training.config.batch import Batch
from training.config.schema import Config
from training.core import heartbeat, log, manifest, next_command, phase_timeouts, rundir
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.data.batch_dataset import BatchDataset
from training.data.duration import TrainingLength, plan_length
from training.data.loader import Batches, as_it_is
from training.host import placement
from training.inspector.distributed import World
from training.tasks import half, math_modes, optim, randomness, trained
from training.tasks.base import Task
from training.trainer import (
    checkpoint,
    checkpoint_transfer,
    ddp_model,
    gpu_peak,
    gradients,
    same_data,
    start_weights,
    time_limit,
)
from training.trainer.async_checkpoint import PHASE, AsyncCheckpointer
from training.trainer.best_score import BestScore
from training.trainer.loss_scale import LossScale
from training.trainer.time_limit import TimeLimit
from training.trainer.weight_average import WeightAverage

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan
    from training.core.contracts.run_files import ManifestRecord, ScoreRecord


@dataclass
class TrainState:
    """One rank's training of a task. `raw`: the bare model; `model`: called by the loop (wrapped by
    DDP if there are several ranks)."""

    config: Config
    run: rundir.RunDir
    world: World
    batch: Batch
    length: TrainingLength
    task: Task
    raw: torch.nn.Module
    # of raw, those in the optimizer: collecting them in each step would take as long as a small
    # kernel
    weights: list[torch.nn.Parameter]
    model: torch.nn.Module
    optimizer: optim.Optimizers
    batches: Batches
    validation: BatchDataset | None
    autocast: torch.autocast
    precision: str  # bf16, fp16, fp8 or fp32
    compiled: bool
    loss_scale: LossScale | None  # of fp16
    position: checkpoint.TrainProgress
    saver: AsyncCheckpointer
    facts: ManifestRecord  # stored in every checkpoint and compared by a resume
    peak: float | None = None  # of all GPUs together (gpu_peak)
    time_limit: TimeLimit | None = None  # of --max_time
    average: WeightAverage | None = None  # of --ema
    best: BestScore | None = None  # of --keep_best
    evaluated: bool = False  # by this process
    unevaluated: bool = False  # the evaluation at `position` is still to be made

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.raw.parameters())

    @cached_property
    def clipped(self) -> list[list[torch.nn.Parameter]]:
        """The weights that are clipped together."""
        return gradients.parts(self.raw, self.weights)

    @property
    def barrier_s(self) -> float:
        """The time limit of a barrier of the training."""
        return phase_timeouts.backstop_s(
            self.config.hang_timeout, supervised="DUET_SUPERVISED" in os.environ
        )

    def steps_left(self, position: checkpoint.TrainProgress) -> int:
        """Whole steps until the end of this epoch."""
        return max(0, len(self.batches.dataset) - position.used) // self.batches.step_sequences

    def steps_to_train(self, position: checkpoint.TrainProgress) -> int:
        """Steps until the end of this epoch or of the training."""
        return max(0, min(self.steps_left(position), self.length.total_steps - position.step))

    def used_s(self) -> float:
        """Of --max_time, by this rank's clock; 0 without a limit."""
        return self.time_limit.now_s() if self.time_limit else 0.0

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients are exchanged only in the last micro-batch of a step."""
        return (
            nullcontext()
            if last or not isinstance(self.model, DistributedDataParallel)
            else self.model.no_sync()
        )

    def averaged(self) -> AbstractContextManager[Any]:
        """The weights of evaluations and samples."""
        return self.average.applied() if self.average else nullcontext()

    def save(
        self,
        position: checkpoint.TrainProgress,
        score: ScoreRecord | None,
        *,
        required: bool,
        unevaluated: bool = False,
    ) -> None:
        """Copy the state on rank 0 and start writing it; if `required`, return when it is on disk
        (OSError). `score`: of the evaluation at this step, if there was one; `unevaluated`: a
        resume makes it. A collective."""
        self.optimizer.gather()
        heartbeat.current.beat(PHASE)
        if self.world.rank != 0:
            return
        state: checkpoint.TensorTree = {
            "model": self.raw.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        if self.loss_scale:
            state["loss_scale"] = self.loss_scale.state_dict()
        if self.average:
            state[trained.AVERAGE] = self.average.state_dict()
        facts: ManifestRecord = {**self.facts, "score": score}
        if unevaluated:
            facts = {**facts, "unevaluated": True}
        if self.time_limit:
            facts = {**facts, "used_s": self.time_limit.used_s}
        self.saver.save(position, state, facts, required=required)


def begin(plan: Plan, run: rundir.RunDir, world: World, task: Task) -> TrainState:
    """Build everything on this rank. All ranks use the same seed; DDP copies rank 0's weights
    anyway."""
    config, batch = task.config, Batch(**plan["batch"])
    if config.deterministic:
        _repeatable()
    randomness.seed(config.seed)
    precision = plan["precision"]["value"]
    math_modes.select(plan, world.device)
    raw = task.checked_model()
    drawn = randomness.state()  # every rank draws its data from here, as ./duet evaluate does
    raw = raw.to(world.device)
    optimizer = task.optimizers(raw)
    weights = optimizer.trained(raw)
    scale = LossScale(world.device) if precision == "fp16" else None
    if scale:
        optimizer.skip_on_device()
    randomness.restore(drawn)
    train = task.rows("train")
    assert train is not None
    facts: ManifestRecord = {
        "shape": {},
        "data": {},
        "tokenizer": None,
        "task": plan["task"]["name"],
        **start_weights.kind_of(optimizer),
        "world_size": world.world_size,
        "run": run.name,
        **task.facts(),
        "samples": len(train),
        "seed": config.seed,
        **({"ema": config.ema} if config.ema else {}),
        **({"task_sha256": task.file_sha256} if task.file_sha256 else {}),
    }
    position = checkpoint.TrainProgress()
    one_machine = placement.on_one_machine(plan["place"])
    if not one_machine:
        same_data.check(task, facts)
    same_data.counted(task, "train", train)
    loaded = checkpoint_transfer.load(run.checkpoints, world, one_machine=one_machine)
    start_weights.report_cut_saves(run, world, loaded.position.step if loaded else 0)
    if loaded:
        position = loaded.position
        if not position.tokens:  # a checkpoint from before tokens were counted
            position = replace(position, tokens=position.step * batch.total_tokens)
        reported = tasks.spec_of(plan).reads_text
        position = same_data.same_order(
            position, loaded.manifest, facts, task, batch, world, reported=reported
        )
        continued = start_weights.load(raw, optimizer, loaded, facts)
        if scale and "loss_scale" in loaded.state:  # else it was trained in another precision
            scale.load_state_dict(loaded.state["loss_scale"])
        start_weights.report_resume(loaded, run, world, facts, plan, optimizer_continued=continued)
    elif "init_from" in plan:
        start_weights.init_from(raw, plan, run, world)
    length = plan_length(
        config, batch, len(train), step=position.step, epoch=position.epoch, used=position.used
    )
    if length is None:
        raise _too_short(len(train), task, batch, world)
    batches = Batches(
        train,
        batch,
        rank=world.rank,
        seed=config.seed,
        workers=config.num_workers,
        persistent=config.persistent_workers,
        # for a GPU the loop copies them ahead of use
        arrive=as_it_is if world.device.type == "cuda" else task.arrive,
    )
    model = ddp_model.wrap(raw, task, plan, world)
    average = start_weights.weight_average(raw, config, loaded)
    autocast = half.autocast(precision, world.device)
    if world.world_size > 2:
        ddp_model.settle_buckets(model, task, autocast, optimizer, train, batch, config.num_workers)
    randomness.restore(drawn)
    validation = _validation(task, facts)
    return TrainState(
        config=config,
        run=run,
        world=world,
        batch=batch,
        length=length,
        task=task,
        raw=raw,
        weights=weights,
        model=model,
        optimizer=optimizer,
        batches=batches,
        validation=validation,
        autocast=autocast,
        precision=precision,
        compiled=plan["compile"]["value"],
        loss_scale=scale,
        position=position,
        saver=_saver(run, config, next_command.next_command(plan, run), position.step, loaded),
        facts=facts,
        peak=gpu_peak.of_all(world, precision),
        time_limit=time_limit.begin(
            config.max_time,
            length.total_steps,
            loaded.manifest if loaded else None,
            run.metrics,
            world,
        ),
        average=average,
        best=BestScore(run.checkpoints, position.step, world, facts, _warner(run))
        if config.keep_best
        else None,
        unevaluated=bool(loaded and loaded.manifest.get("unevaluated") and config.eval_every),
    )


def _validation(task: Task, facts: ManifestRecord) -> BatchDataset | None:
    """The validation data; `facts` get how much of it is measured."""
    data = same_data.counted(task, "val", task.rows("val"))
    if data is not None:
        facts["measured"] = task.measured(len(data))
    return data


def _too_short(count: int, task: Task, batch: Batch, world: World) -> UserError:
    what = msg(
        "trainer.state.too_short",
        count=count,
        unit=task.unit,
        total=batch.total_tokens,
        batch=batch.sentence(task.unit),
    )
    most = count // world.world_size * world.world_size
    fixes = [f"--device_batch_size=1 --total_batch_size={most}"] if most else []
    problem = Problem("data.too_short", what, msg("trainer.state.more_data"), fixes)
    return UserError(problem, said_by_another=world.rank != 0)


def _repeatable() -> None:
    """Select algorithms that give the same bits in every run on the same GPUs; torch raises
    RuntimeError for an operator without one. The variables that belong to it are set in the plan
    (training.host.env_vars)."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True


def _warner(run: rundir.RunDir) -> Callable[[str, str], None]:
    def warned(code: str, text: str) -> None:
        log.warning(text)
        run.event("warning", code=code, text=text)

    return warned


def _saver(
    run: rundir.RunDir,
    config: Config,
    resume: str,
    step: int,
    loaded: checkpoint.LoadedCheckpoint | None,
) -> AsyncCheckpointer:
    """`resume`: the command that continues the run; `step`: at which this start begins."""

    def saved(step: int, path: Path) -> None:
        run.event("checkpoint", step=step, path=str(path))

    later = [path for path in manifest.all_in(run.checkpoints) if manifest.step_of(path) > step]
    return AsyncCheckpointer(
        run.checkpoints,
        config.keep_checkpoints,
        saved,
        _warner(run),
        resume,
        keep_best=config.keep_best,
        discarded=later,
        unreadable=loaded.unreadable if loaded else (),
    )
