"""A trained model in memory, with torch: what `./duet sample`, `restore`, `evaluate` and
`export` use, and training.tasks.load_model()."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from training.core import log, units
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.tasks import module_versions, own_error, own_modules
from training.tasks.gpu_error import first_line, of_gpu, resort
from training.tasks.weights import Weights, damaged

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from torch import nn

    from training.data.batch_dataset import BatchDataset
    from training.tasks.base import Task
    from training.tasks.evaluation import Part
    from training.tasks.math_modes import Fp32Modes
    from training.tasks.randomness import RandomState
    from training.tasks.spec import TaskSpec


PICTURED = 6  # samples
EVALUATED = 16  # most samples per batch
# where programs keep the weights in a file; the last ones are of BasicSR and DeepSpeed
INNER = ("model", "model_state_dict", "state_dict", "net", "params", "params_ema", "module")
AVERAGE = "ema"  # the moving average of the weights in a checkpoint, by name of the parameter
EXTRA = "_extra_state"  # of get_extra_state(): the last part of its name in a state_dict()
LISTINGS = 3  # of a run's checkpoints, while its training replaces them
COMPILED = "_orig_mod."  # of torch.compile, anywhere in a name
UNSAFE = re.compile(r"GLOBAL (\S+)")  # in the error of torch.load(weights_only=True)
Progress = Callable[[int, int], None]  # done, of total


def silent(done: int, total: int) -> None:
    """Progress callback that ignores its arguments."""


class Trained:
    """`model`: in eval mode, on `device`; `task`: None if the model needs none. `drawn`: the random
    numbers after the model was made, from which the task makes its data; None: it draws none.
    `modes`: what the task had set by then; None: it sets none."""

    def __init__(
        self,
        weights: Weights,
        model: nn.Module,
        device: torch.device,
        task: Task | None = None,
        drawn: RandomState | None = None,
        modes: Fp32Modes | None = None,
    ) -> None:
        self.weights, self.device, self.task = weights, device, task
        self._drawn, self._modes = drawn, modes
        self.model = model.to(device).eval()

    def evaluate(
        self, progress: Progress = silent, parts: list[Part] | None = None
    ) -> dict[str, float]:
        """Scores on the data of TaskSpec.aim(), by name. Parts of the data that are worth looking
        at are appended to `parts`. Raises UserError."""
        assert self.task
        from training.tasks import math_modes, randomness

        file = self.weights.task_file
        with ExitStack() as around:
            plan = self.weights.plan
            around.enter_context(math_modes.as_trained(plan, self.device, self._modes))
            if self._drawn is not None:
                if file:
                    own_modules.use(file.parent)
                around.enter_context(randomness.apart())
                around.enter_context(own_error.reported(file, of_gpu))
                randomness.restore(self._drawn)
            return self._evaluate(self.task, progress, parts)

    def _evaluate(
        self, task: Task, progress: Progress, parts: list[Part] | None
    ) -> dict[str, float]:
        data = self._validation(task)
        if data is None and self.weights.task_file:
            what = msg("tasks.trained.no_val_data", file=self.weights.task_file)
            raise UserError(Problem("task.no_val_data", what, msg("tasks.trained.val_data")))
        if data is None or not len(data):
            raise UserError(Problem("data.empty", task.why_not(0)))
        import torch

        from training.tasks import half

        sums: dict[str, float] = {}
        planned = self.weights.plan.get("precision")  # exports of earlier versions lack it
        precision = half.on(planned["value"] if planned else "fp32", self.device)
        autocast = half.autocast(precision, self.device)
        micro = task.config.device_batch_size  # more may form no batch, or not fit into memory
        most = min(EVALUATED, micro) if isinstance(micro, int) else EVALUATED
        size = task.eval_batch or most
        for start in range(0, len(data), size):
            stop = min(start + size, len(data))
            with torch.no_grad():
                batch = task.arrive(data.rows(range(start, stop)))
                with autocast:
                    found = task.measure(self.model, batch)
            task.check_names(found, sums or found, "the batches before")
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + float(value)
            if parts is not None and stop - start == 1:
                pictured = start in {
                    round(n * (len(data) - 1) / (PICTURED - 1)) for n in range(PICTURED)
                }
                with torch.no_grad(), autocast:
                    part = task.part(self.model, start, batch, pictured)
                if part:
                    part.scores = task.scores({n: float(v) for n, v in found.items()})
                    parts.append(part)
            progress(stop, len(data))
        return task.scores(sums)

    def _validation(self, task: Task) -> BatchDataset | None:
        """Raises UserError, also where val_data() of a user's file raises another error."""
        try:
            return task.rows("val")
        except Exception as error:
            file = self.weights.task_file
            if isinstance(error, UserError) or not file or of_gpu(error):
                raise
            raise own_error.of_val_data(file, error) from error

    def describe(self) -> str:
        """The model in words."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        return msg("tasks.base.parameters", millions=units.millions(count))

    def usage(self, form: str) -> str:
        """Python that loads the exported folder, for its model card."""
        return (
            "from training.tasks import load_model\n\n"
            'model = load_model("FOLDER").model  # torch.nn.Module'
        )

    def export_files(self, folder: Path, hub: bool) -> str | None:
        """Write what is needed besides the weights into `folder`. `hub`: for programs that load
        models of Hugging Face. Returns the identity of the tokenizer, as in a checkpoint. Raises
        OSError."""
        return None


Model = TypeVar("Model", bound=Trained)
Result = TypeVar("Result")


@dataclass(frozen=True)
class TextStep:
    """One token of each sample: its text ("" while a character is incomplete), and whether there
    was one."""

    texts: list[str]
    live: list[bool]


class TextModel(Trained):
    """A model that continues text."""

    @abstractmethod
    def together(self, prompt: str, max_tokens: int) -> int:
        """How many samples of a prompt to compute together, by their memory; at least 1."""

    @abstractmethod
    def stream(
        self,
        prompt: str,
        max_tokens: int = 256,
        temperature: float = 0.8,
        top_k: int = 0,
        seed: int | None = None,
        samples: int = 1,
    ) -> Iterator[TextStep]:
        """The continuation of a prompt as it is generated, ending where the model ends the
        document. `temperature` 0: the most likely tokens; `top_k` 0: drawn from all tokens; `seed`
        None: drawn."""

    def generate(
        self,
        prompt: str = "",
        max_tokens: int = 256,
        temperature: float = 0.8,
        top_k: int = 0,
        seed: int | None = None,
    ) -> str:
        """The whole continuation, without the prompt; arguments as in stream()."""
        steps = self.stream(prompt, max_tokens, temperature, top_k, seed)
        return "".join(step.texts[0] for step in steps)


@dataclass(frozen=True)
class Pieces:
    """How a video is divided. `window`: frames restored together; `shared`: those in two windows;
    `tile`: side of a square in input pixels, 0: whole frames; `overlap`: pixels in two tiles."""

    window: int
    shared: int
    tile: int
    overlap: int


class FrameModel(Trained):
    """A model that restores the frames of a video."""

    @property
    @abstractmethod
    def scale(self) -> int:
        """Size of a restored frame relative to its input."""

    @abstractmethod
    def pieces(
        self, size: tuple[int, int], count: int | None, window: int | None, tile: int | None
    ) -> Pieces:
        """The pieces for frames of this size (width, height); `count`: frames, None: unknown.
        `window`, `tile`: as asked, None: as the training and the free memory suggest."""

    @abstractmethod
    def restore(
        self, frames: Iterable[npt.NDArray[Any]], pieces: Pieces
    ) -> Iterator[npt.NDArray[Any]]:
        """uint8 (h, w, 3) → uint8 (h × scale, w × scale, 3), frame by frame; a few windows are in
        memory at a time."""


def load(spec: TaskSpec, weights: Weights, device: str = "cpu") -> Trained:
    """The model with its weights, verified. `device`: cpu, cuda or auto. Raises UserError."""
    weights, state = read_state(weights)
    import torch

    name = device
    if device == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            Problem(
                "gpu.too_few",
                msg("tasks.trained.no_gpu"),
                msg("tasks.trained.devices"),
                ["--device=cpu"],
            )
        )
    try:
        return spec.trained(weights, state, torch.device(name))
    except RuntimeError as error:  # of load_state_dict(), or of the GPU
        full = name == "cuda" and of_gpu(error)
        reason = first_line(error) if full else " ".join(str(error).split())[:300]
    if full:
        resort(device, reason)
        return load(spec, weights, "cpu")
    what = msg("tasks.trained.other_model", path=weights.file, error=reason)
    raise UserError(Problem("resume.other_model", what, msg("tasks.weights.allowed")))


def using(
    spec: TaskSpec, model: Model, device: str, use: Callable[[Model], Result]
) -> tuple[Model, Result]:
    """use(model); after an error of the GPU again with a model on the CPU, as in load()."""
    try:
        return model, use(model)
    except RuntimeError as error:
        if model.device.type != "cuda" or not of_gpu(error):
            raise
        reason = first_line(error)
    resort(device, reason)
    again = cast("Model", load(spec, model.weights, "cpu"))
    return again, use(again)


def read_state(
    weights: Weights, listings: int = LISTINGS
) -> tuple[Weights, Mapping[str, torch.Tensor]]:
    """The tensors by name, on the CPU, and the weights that were intact: an earlier checkpoint is
    used, with a warning, if the newest is damaged, and a newer one where a training has replaced
    those that were found. Raises UserError."""
    wrong: list[str] = []
    for one in (weights, *weights.earlier):
        # Both take about a second: the checksum of a large file, and the import of torch.
        with ThreadPoolExecutor(1) as pool:
            damage = pool.submit(one.damage)
            import torch  # noqa: F401

            text = damage.result()
        try:
            if not text:
                return one, tensors(one.file, averaged=one.averaged)
        except UserError:
            if one.file.parent.exists():
                raise
        if not one.file.parent.exists():
            if weights.again and listings:
                return read_state(weights.again().planned(weights.plan), listings - 1)
            what = msg("tasks.trained.deleted", path=one.file.parent)
            raise UserError(Problem("weights.deleted", what, msg("tasks.weights.allowed")))
        wrong.append(f"{one.file.parent.name}: {text}")
        log.warning(msg("tasks.trained.skipped", text=wrong[-1]))
    raise damaged(weights.file.parent.parent, wrong)


def tensors(file: Path, *, averaged: bool = False) -> Mapping[str, torch.Tensor]:
    """The tensors of a file of weights by name; `averaged`: their moving average, where the file
    has one. Never executes what a pickle contains. Raises UserError."""
    if file.suffix == ".safetensors":
        from training.tasks import safetensors_file

        return safetensors_file.read(file)
    from training.tasks import torch_file

    try:
        found = torch_file.load(file)
    except Exception as error:  # torch raises many kinds for a file in another format
        if unsafe := UNSAFE.search(str(error)):
            raise unreadable(file, msg("tasks.trained.objects", name=unsafe[1])) from None
        raise unreadable(file, str(error) or type(error).__name__) from None
    named = named_tensors(found, averaged)
    if named is None:
        raise unreadable(file, msg("tasks.trained.no_tensors"))
    return named


def named_tensors(found: object, averaged: bool) -> Mapping[str, torch.Tensor] | None:
    """The weights in what torch.load() returned: a dictionary of tensors and extra states, or one
    inside it under a usual name."""
    import torch

    if not isinstance(found, Mapping):
        return None
    for inner in ("params_ema", *INNER) if averaged else INNER:
        if isinstance(found.get(inner), Mapping):
            named = named_tensors(found[inner], averaged)
            average = named_tensors(found.get(AVERAGE), averaged) if averaged else None
            if named and average and average.keys() <= named.keys():
                return module_versions.added({**named, **average}, module_versions.of(named))
            return named
    if found and all(
        isinstance(value, torch.Tensor) or is_extra(str(name)) for name, value in found.items()
    ):
        return found
    return None


def is_extra(name: str) -> bool:
    """Whether this is the name of an extra state in a state_dict()."""
    return name.rpartition(".")[2] == EXTRA


def fitted(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """The tensors under the names of a model's own: without the prefixes of DDP, torch.compile and
    other modules around the model. As found if no prefix helps."""
    names = {name.replace(COMPILED, ""): tensor for name, tensor in found.items()}
    ending = next((f".{name}" for name in wanted), "")
    prefixes = [name[: 1 - len(ending)] for name in names if ending and name.endswith(ending)]
    parts = {
        prefix: {n.removeprefix(prefix): t for n, t in names.items() if n.startswith(prefix)}
        for prefix in ("", *prefixes)
    }

    def hits(part: Mapping[str, torch.Tensor]) -> int:
        return len(part.keys() & wanted.keys())

    best = max(parts, key=lambda prefix: hits(parts[prefix]))
    if hits(parts[best]) <= hits(found):
        return found

    def own(name: str) -> str | None:
        name = name.replace(COMPILED, "")
        return name.removeprefix(best) if name.startswith(best) else None

    versions = module_versions.renamed(module_versions.of(found), own)
    return module_versions.added(parts[best], versions)


def unreadable(file: Path, error: object) -> UserError:
    return UserError(
        Problem(
            "weights.unreadable",
            msg("tasks.trained.unreadable", file=file, error=" ".join(str(error).split())[:300]),
            msg("tasks.weights.allowed"),
        )
    )
