"""Validation of any task: every sample counts once, for any batch and number of ranks."""

from __future__ import annotations

import json
import multiprocessing
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from tests.cases import each
from training.config.batch import Batch
from training.config.schema import Config
from training.core.errors import Exit
from training.data.token_dataset import TokenDataset
from training.inspector.distributed import World
from training.tasks import BUILT_IN
from training.tasks.base import Samples, Task
from training.tasks.sample_spec import SampleSpec
from training.tasks.video_restoration.dataset import Validation
from training.trainer import evaluate as evaluation
from training.trainer.evaluate import Scores, StopChecks, Stopped, evaluate, why_not
from training.trainer.step_stats import StopRequest

CPU = torch.device("cpu")


class Square(Task):
    """Validated on the numbers 0 … 9: their mean is 4.5, that of their squares 28.5."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> Dataset[Any]:
        return TensorDataset(torch.arange(10.0))

    def val_data(self) -> Dataset[Any]:
        return TensorDataset(torch.arange(self.options.count, dtype=torch.float32))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return (batch[0] ** 2).mean()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        assert not model.training
        return {"plain": batch[0], "square": batch[0] ** 2}


def session(count: int, size: int, rank: int = 0, ranks: int = 1, **config: Any) -> Any:
    task = Square(SimpleNamespace(count=count), Config(**config), CPU)
    return SimpleNamespace(
        raw=task.model(),
        validation=task.rows("val"),
        world=World(rank, rank, ranks, CPU, "none", "-"),
        batch=Batch(size, 1, ranks, 1),
        config=task.config,
        task=task,
        autocast=torch.autocast("cpu", torch.bfloat16, enabled=False),
        compiled=False,
    )


@pytest.mark.parametrize("size", [1, 3, 64])
def test_each_sample_counts_once_for_any_batch(size: int) -> None:
    made = session(10, size)
    assert evaluate(made) == {"plain": 4.5, "square": 28.5} and made.raw.training, (
        "training mode is restored"
    )
    made.task.eval_batch = 2
    assert evaluate(made) == {"plain": 4.5, "square": 28.5}


@pytest.mark.parametrize(("count", "ranks"), [(10, 3), (2, 4), (1, 2)])
def test_ranks_share_samples_and_a_rank_without_any_adds_nothing(
    count: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks sum the same number of figures, since the reduction is a collective."""
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: sent.append(total.clone()))
    monkeypatch.setattr(evaluation, "_agree", lambda names, world, task: None)
    for rank in range(ranks):
        evaluate_alone(session(count, 2, rank, ranks))
    numbers = torch.arange(count, dtype=torch.float64)
    assert [len(sums) for sums in sent] == [3] * ranks
    assert torch.stack(sent).sum(0).tolist() == [
        count,
        numbers.sum().item(),
        (numbers**2).sum().item(),
    ]


def test_a_rank_without_samples_adds_nothing_to_an_infinite_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: sent.append(total.clone()))
    monkeypatch.setattr(evaluation, "_agree", lambda names, world, task: None)
    made = session(1, 2, 1, 2)
    made.task.metrics = lambda model, batch: {"plain": torch.full_like(batch[0], torch.inf)}
    evaluate_alone(made)
    assert [sums.tolist() for sums in sent] == [[0.0, 0.0]]


def evaluate_alone(made: Any) -> Scores | None:
    """A rank without samples has zero sums until the others' are added, so it cannot divide."""
    made.task.scores = dict
    return evaluate(made)


def test_missing_validation_is_explained() -> None:
    assert why_not(session(10, 2)) == "" == why_not(session(0, 2, eval_every=0))
    assert (
        why_not(session(0, 2)) == "no validation: the validation data is empty"
        and evaluate(session(0, 2)) is None
    )
    made = session(10, 2)
    made.validation = None
    assert evaluate(made) is None and why_not(made) == ""


def test_without_metrics_the_loss_is_validated() -> None:
    made = session(10, 5)
    made.task.metrics = lambda model, batch: Task.metrics(made.task, model, batch)
    assert evaluate(made) == {"loss": pytest.approx((6 + 51) / 2)}


def test_the_activations_of_a_batch_are_gone_before_the_next() -> None:
    """Compiled, validation runs with gradients, as the training step does."""
    alive: list[weakref.ref[torch.Tensor]] = []

    class Linear(Square):
        def fill(self, rows: Any, size: int) -> Any:
            return rows

        def measure(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
            assert torch.is_grad_enabled() and not any(one() is not None for one in alive)
            hidden = model(batch[0][:, None]) * 2
            alive.append(weakref.ref(hidden))
            return {"plain": hidden.pow(2).sum()}

    made = session(10, 2)
    made.task, made.compiled = Linear(made.task.options, made.config, CPU), True
    evaluate_alone(made)
    assert len(alive) == 5


def test_a_frozen_part_stays_frozen() -> None:
    made = session(10, 3)
    made.raw.backbone = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5)).eval()
    evaluate(made)
    assert made.raw.training and not any(m.training for m in made.raw.backbone.modules())


class Opened(Dataset[Any]):
    """The number of a sample, and the process that read it."""

    broken = False
    most_readers: int | None = None

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[float, int]:
        if self.broken and index == 4:
            raise LookupError(f"sample {index} is damaged")
        return float(index), os.getpid()


def opened(workers: int, seen: set[int], **more: Any) -> Any:
    def metrics(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        seen.update(batch[1].tolist())
        return {"plain": batch[0]}

    made = session(10, 3, num_workers=workers)
    data = Opened()
    vars(data).update(more)
    made.validation, made.task.metrics = Samples(data, 1, drawn=False), metrics
    return made


def test_a_rank_with_workers_reads_no_sample_itself() -> None:
    """Workers of the next epoch, forked from it, would share a file opened by the data set."""
    for workers, more in [(0, {}), (2, {"most_readers": 0})]:
        seen = set[int]()
        assert evaluate(opened(workers, seen, **more)) == {"plain": 4.5} and seen == {os.getpid()}
    for workers, most, readers in [(2, None, 2), (3, 1, 1), (8, None, 4)]:  # of four batches
        seen = set[int]()
        assert evaluate(opened(workers, seen, most_readers=most)) == {"plain": 4.5}
        assert len(seen) == readers and os.getpid() not in seen
    made, drawn = opened(2, seen), torch.get_rng_state()
    evaluate(made)
    assert torch.equal(torch.get_rng_state(), drawn), "as without workers"
    assert not multiprocessing.active_children()


def test_the_readers_of_a_part_of_a_data_set_are_limited_as_its_own() -> None:
    """Of several data sets, by the smallest limit."""

    def limited(most: int | None) -> Opened:
        data = Opened()
        data.most_readers = most
        return data

    half, rest = random_split(limited(0), [5, 5])
    joined = ConcatDataset([limited(3), Subset(limited(2), [1]), limited(None)])
    preferred = Subset(limited(0), [1, 2])
    preferred.most_readers = 1  # type: ignore[attr-defined]
    for data, most in ((half, 0), (rest, 0), (joined, 2), (preferred, 1), (Subset(joined, [0]), 2)):
        assert Samples(data, 1, drawn=False).most_readers == most
    assert Samples(Subset(limited(None), [0]), 1, drawn=False).most_readers is None


def test_workers_that_preflight_counts_for_a_validation() -> None:
    """Text and clips are read in the rank: clips do not fit into shared memory."""
    readers = {"gpt": TokenDataset.most_readers, "video_restoration": Validation.most_readers}
    assert readers.keys() == BUILT_IN.keys()
    for name, spec in BUILT_IN.items():
        assert readers[name] == 0 and not spec.validation_workers
    assert SampleSpec.validation_workers


def test_the_worker_of_a_failed_validation_ends() -> None:
    made = opened(1, set())
    made.task.check_names = lambda *names: 1 // 0
    with pytest.raises(ZeroDivisionError):
        evaluate(made)
    assert not multiprocessing.active_children()
    with pytest.raises(LookupError, match=r"in __getitem__(?s:.*)sample 4 is damaged"):
        evaluate(opened(1, set(), broken=True))


@each("value", [torch.tensor(4.5), torch.ones(2, 3), 4.5])
def test_a_score_that_is_not_one_value_per_sample_is_refused(value: Any) -> None:
    made = session(10, 2)
    made.task.metrics = lambda model, batch: {"mean": value}
    with pytest.raises(TypeError, match=r"metrics\(\) of Square .*'mean' .*\(2,\)"):
        evaluate(made)


@each("value", [[4.5, 4.5], np.ones(2), True, None, "high", torch.ones(2, dtype=torch.complex64)])
def test_other_values_than_real_tensors_are_refused_by_name(value: Any) -> None:
    made = session(10, 2)
    made.task.metrics = lambda model, batch: {"plain": batch[0], "own": value}
    with pytest.raises(TypeError, match=r"metrics\(\) of Square returned .* as 'own' .*\(2,\)"):
        evaluate(made)


@each("values", [torch.tensor([True, False]), torch.tensor([1, 3], dtype=torch.uint8)])
def test_booleans_and_integers_are_averaged(values: torch.Tensor) -> None:
    made = session(2, 2)
    made.task.metrics = lambda model, batch: {"own": values}
    assert evaluate(made) == {"own": values.double().mean().item()}


@each("found", [None, 4.5, [("own", torch.ones(2))], torch.ones(2)])
def test_metrics_are_a_dictionary(found: Any) -> None:
    made = session(10, 2)
    made.task.metrics = lambda model, batch: found
    with pytest.raises(TypeError, match=r"metrics\(\) of Square returned .* must be a dictionary"):
        evaluate(made)


@each("name", [1, None, "", ("a", "b")])
def test_a_metric_has_a_name(name: Any) -> None:
    """An empty one would replace the number of samples."""
    made = session(10, 2)
    made.task.metrics = lambda model, batch: {"plain": batch[0], name: batch[0]}
    with pytest.raises(TypeError, match=r"metrics\(\) of Square returned the name "):
        evaluate(made)


def test_a_batch_with_other_names_is_refused() -> None:
    made = session(10, 4)
    made.task.metrics = lambda model, batch: (
        {"plain": batch[0]} if len(batch[0]) == 4 else {"square": batch[0]}
    )
    with pytest.raises(TypeError, match=r"'square', but 'plain' for the batches before"):
        evaluate(made)


class Named(Square):
    """`names`: of this rank's figures, in its order."""

    names: tuple[str, ...] = ()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        both = super().metrics(model, batch)
        return {name: both[name.strip("+")] for name in self.names}


BOTH = ("plain", "square")
# names of the two ranks → what each gets: its figures in its order, or part of the error
NAMES: list[tuple[list[tuple[str, ...]], list[Any]]] = [
    (
        [BOTH, ("square", "plain")],
        [[["plain", 4.5], ["square", 28.5]], [["square", 28.5], ["plain", 4.5]]],
    ),
    (
        [BOTH, ("plain",)],
        ["'plain', 'square', but 'plain' for rank 1", "'plain', but 'plain', 'square' for rank 0"],
    ),
    (
        [BOTH, ("plain", "square+")],
        ["but 'plain', 'square+' for rank 1", "but 'plain', 'square' for rank 0"],
    ),
]


def _rank(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    answers: list[Any] = []
    for names, _ in NAMES:
        made = session(10, 2, rank, 2)
        made.task = Named(made.task.options, made.config, CPU)
        made.task.names = names[rank]
        try:
            answers.append(list((evaluate(made) or {}).items()))
        except TypeError as error:
            answers.append(str(error))
    made = session(10, 2, rank, 2)
    made.raw.register_buffer("factor", torch.tensor(rank + 1.0))
    made.raw.register_buffer("own", torch.tensor(rank + 1.0))
    made.raw._ddp_params_and_buffers_to_ignore = ["own"]
    made.raw.register_buffer("constant", torch.tensor(rank + 1.0), persistent=False)
    made.task.metrics = lambda model, batch: {"scaled": batch[0] * model.factor}
    answers.append([evaluate(made), [b.item() for b in made.raw.buffers()]])
    Path(folder, str(rank)).write_text(json.dumps(answers))
    dist.destroy_process_group()


def test_ranks_add_figures_of_the_same_name_and_model(tmp_path: Path) -> None:
    """A set has another order in each process; the first name of a rank stays its main score. All
    measure with the buffers of rank 0, which a checkpoint contains."""
    mp.spawn(_rank, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
    for rank in range(2):
        answers = json.loads((tmp_path / str(rank)).read_text())
        for (_, wanted), answer in zip(NAMES, answers[:-1], strict=True):
            assert answer == wanted[rank] or wanted[rank] in answer
        assert answers[-1] == [{"scaled": 4.5}, [1.0, rank + 1.0, rank + 1.0]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_ends_an_evaluation_before_a_batch_that_all_ranks_have(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request comes to the other rank, during its third batch of half a second."""
    clock, checked, batches = [0.0], list[int](), list[float]()
    monkeypatch.setattr(evaluation.time, "monotonic", lambda: clock[0])
    made, request = session(40, 1, 0, ranks), StopRequest()

    def agree(facts: torch.Tensor, op: Any) -> None:
        checked.append(len(batches))
        facts[0] = max(float(facts[0]), Exit.PREEMPTED * (len(batches) > 2))

    def metrics(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        clock[0] += 0.5
        batches.append(float(batch[0]))
        if ranks == 1 and len(batches) == 3:
            request.code = Exit.PREEMPTED
        return {"plain": batch[0]}

    monkeypatch.setattr(torch.distributed, "all_reduce", agree)
    made.task.metrics = metrics
    with pytest.raises(Stopped) as ended:
        evaluate(made, request)
    assert ended.value.code == Exit.PREEMPTED and made.raw.training
    assert len(batches) == 3 and checked == ([0, 1, 3] if ranks == 2 else [])


def test_checks_for_a_stop_are_seconds_apart_and_end_with_the_fewest_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, checked = [0.0], list[int]()
    monkeypatch.setattr(evaluation.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda facts, op: checked.append(batch))
    checks = StopChecks(StopRequest(), World(0, 0, 2, CPU, "none", "-"), 60)
    for batch in range(99):
        checks.before(batch)
        clock[0] += 0.125 if batch < 40 else 8.0
    assert checked == [0, 1, 3, 7, 15, 31, 47, *range(48, 60)]
