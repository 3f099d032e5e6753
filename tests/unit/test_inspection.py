"""DDPInspector in a training loop. Several ranks in this process share a store; everything else is
real."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
)

from tests.cases import each
from tests.conftest import wait_until
from tests.unit.conftest import python
from training.inspector import DDPInspector, InspectionError, inspector, reporting
from training.inspector.shared_store import OwnStore, SharedStore

LOADERS = Callable[[int], Any]


class Samples(Dataset[torch.Tensor]):
    def __init__(self, count: int = 320, own: int = 0) -> None:
        self.count, self.own = count, own

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(6, generator=torch.Generator().manual_seed(index + self.own))


class Noisy(Samples):
    """Random augmentation: a sample is different each time."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + torch.randn(6)


class Few(Samples):
    """Values that repeat often, like labels or masks."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index % 2), *[0.0] * 5])


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, first: int, step: int) -> None:
        self.indices = range(first, 200, step)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(Samples().__getitem__, self.indices)


def sharded(data: Any, rank: int, batch: int = 4, **more: Any) -> Any:
    return DataLoader(data, batch_size=batch, sampler=DistributedSampler(data, 2, rank, **more))


class Ranks:
    """Ranks that train in lockstep; `change(rank, step, model)` and `spoil(rank, step, batch)`
    inject errors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self._patch = monkeypatch
        monkeypatch.setattr(
            reporting.FindingsOutput, "line", lambda _, text: self.lines.append(text)
        )
        self.inspectors: list[DDPInspector] = []

    def start(self, loaders: LOADERS, world: int = 2, **options: Any) -> list[torch.nn.Module]:
        store, numbers = OwnStore(), iter(range(world))
        self._patch.setattr(
            inspector, "open_board", lambda _: SharedStore(store, next(numbers), world)
        )
        torch.manual_seed(0)
        first = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Linear(3, 1))
        models: list[torch.nn.Module] = [copy.deepcopy(first) for _ in range(world)]
        self.loaders = [loaders(rank) for rank in range(world)]
        for model, loader in zip(models, self.loaders, strict=True):
            self.inspectors.append(DDPInspector(model, loader, every=4, wrapped=True, **options))
        return models

    def train(
        self,
        loaders: LOADERS,
        *,
        world: int = 2,
        epochs: int = 1,
        steps: int = 12,
        given: bool = True,
        change: Callable[[int, int, torch.nn.Module], None] = lambda rank, step, model: None,
        spoil: Callable[[int, int, torch.Tensor], torch.Tensor] = lambda rank, step, batch: batch,
        **options: Any,
    ) -> list[str]:
        """The warnings."""
        models = self.start(loaders, world, **options)
        step = 0
        for _ in range(epochs):
            for batches in zip(*self.loaders, strict=False):
                if step == steps:
                    break
                step += 1
                for rank, fetched in enumerate(batches):
                    batch = spoil(rank, step, fetched)
                    loss = models[rank](batch).square().mean()
                    change(rank, step, models[rank])
                    self.inspectors[rank].step(loss, batch if given else None)
        self.close()
        return [
            text.removeprefix("WARNING: ") for text in self.lines if text.startswith("WARNING: ")
        ]

    def close(self) -> None:
        for one in reversed(self.inspectors):
            one._close("its loop ended", 10.0)
        self.inspectors.clear()

    def logged(self, text: str) -> bool:
        return any(text in line for line in self.lines)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    made = Ranks(monkeypatch)
    yield made
    made.close()


GOOD: dict[str, LOADERS] = {
    "sampler": lambda rank: sharded(Samples(), rank),
    "shuffled": lambda rank: sharded(Samples(), rank, shuffle=True),
    "workers": lambda rank: DataLoader(
        Samples(), 4, sampler=DistributedSampler(Samples(), 2, rank), num_workers=1
    ),
    "padded": lambda rank: sharded(Samples(5), rank),  # three each: one twice
    "few": lambda rank: sharded(Few(), rank),
    "a part of the stream": lambda rank: DataLoader(Stream(rank, 2), 4),
    "a dataset of its own": lambda rank: DataLoader(Samples(own=1000 * rank), 4),
    "a subset of its own": lambda rank: DataLoader(
        Subset(Samples(), range(100 * rank, 100 * rank + 100)), 4, shuffle=True
    ),
    "batches": lambda rank: [
        torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + n))
        for n in range(10)
    ],
    "batch sampler": lambda rank: DataLoader(
        Samples(), batch_sampler=BatchSampler(range(160 * rank, 160 * rank + 160), 4, False)
    ),
    "with replacement": lambda rank: DataLoader(
        Samples(4000),
        4,
        sampler=RandomSampler(Samples(4000), True, generator=torch.Generator().manual_seed(rank)),
    ),
}


@each("name", GOOD)
@each("given", [True, False])
def test_no_findings_without_errors(ranks: Ranks, name: str, given: bool) -> None:
    epochs = 6 if name == "padded" else 2  # rank 1 sees later what rank 0 saw
    assert ranks.train(GOOD[name], given=given, epochs=epochs, on_finding="raise") == []
    step = 4 if name != "padded" else 1
    assert ranks.logged(f"step {step}: all ranks train: rank 0: ") and ranks.logged(
        "parameters equal ("
    )
    if given and name not in ("padded", "few"):
        assert ranks.logged("the ranks' samples are disjoint")


SAME: dict[str, tuple[LOADERS, str]] = {
    "no sampler": (lambda rank: DataLoader(Samples(), 4), "by content"),
    "same order": (
        lambda rank: DataLoader(Samples(), 4, sampler=DistributedSampler(Samples(), 2, 0)),
        "by content",
    ),
    "own orders": (
        lambda rank: DataLoader(
            Samples(),
            4,
            sampler=RandomSampler(Samples(), generator=torch.Generator().manual_seed(rank)),
        ),
        "each of them draws all 320 samples of the dataset: no DistributedSampler",
    ),
    "same stream": (
        lambda rank: DataLoader(Stream(0, 1), 4),
        "32 of their first 32 are the same, by content",
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_ranks_that_train_on_the_same_samples(ranks: Ranks, name: str) -> None:
    loaders, evidence = SAME[name]
    (warning,) = ranks.train(loaders)
    assert warning.startswith("ranks 0, 1 train on the same samples: ") and evidence in warning


def test_the_same_samples_by_their_indices_alone(ranks: Ranks) -> None:
    (warning,) = ranks.train(
        lambda rank: DataLoader(Samples(), 4, sampler=DistributedSampler(Samples(), 2, 0)),
        given=False,
    )
    assert "32 of their first 32 indices are the same" in warning
    assert ranks.train(lambda rank: DataLoader(Samples(), 4), disjoint=False) == [warning], (
        "intended"
    )


def test_random_augmentation_hides_equal_samples(ranks: Ranks) -> None:
    """The same holds for a dataset that depends on its rank."""
    assert ranks.train(lambda rank: DataLoader(Noisy(), 4)) == []
    assert ranks.logged("they draw the same indices, but their samples differ")


@pytest.mark.parametrize(
    ("world", "who", "guilty"),
    [(2, "ranks 0, 1 among each other", None), (3, "rank 2 against the other 2", 2)],
)
def test_differing_parameters(ranks: Ranks, world: int, who: str, guilty: int | None) -> None:
    def change(rank: int, step: int, model: torch.nn.Module) -> None:
        if rank == world - 1 and step == 6:
            with torch.no_grad():
                model[1].weight.view(torch.int32)[0, 1] ^= 1  # type: ignore[index]

    (warning,) = ranks.train(
        lambda rank: DataLoader(Stream(rank, world), 4),
        world=world,
        change=change,
        on_finding="warn",
    )
    assert warning == f"parameters differ at step 8: {who}; 1 of 4, first 1.weight"
    equal = [
        bool(re.match(rf"step {step}: .*parameters equal", line))
        for step in (4, 8)
        for line in ranks.lines
        if f"step {step}: all" in line
    ]
    assert equal == [True, False]


def test_all_ranks_raise_the_finding_of_one(ranks: Ranks) -> None:
    models = ranks.start(GOOD["sampler"])
    with torch.no_grad():
        models[1][0].bias += 1  # type: ignore[index,operator]
    batch = torch.randn(4, 6)
    for one in ranks.inspectors:
        one.step(torch.tensor(1.0), batch)
    for one in reversed(ranks.inspectors):
        wait_until(lambda one=one: one._watcher.raised, what="the finding of rank 0")
        with pytest.raises(
            InspectionError, match=r"parameters differ at step 1: .* first 0\.bias"
        ) as caught:
            one.step(torch.tensor(1.0), batch)
        assert caught.value.guilty_rank is None and caught.value.kind == "parameters_differ"


@pytest.mark.parametrize("given", [True, False])
def test_a_non_finite_loss_names_rank_and_samples(ranks: Ranks, given: bool) -> None:
    def spoil(rank: int, step: int, batch: torch.Tensor) -> torch.Tensor:
        batch[2, 0] = float("inf") if (rank, step) == (1, 3) else batch[2, 0]
        return batch

    with pytest.raises(InspectionError) as caught:
        ranks.train(lambda rank: sharded(Samples(), rank, shuffle=False), spoil=spoil, given=given)
    assert caught.value.guilty_rank == 1
    what = "input is not finite: sample 21; " if given else ""
    assert (
        str(caught.value)
        == f"loss is nan on rank 1 at step 3 (epoch 1, batch 3; {what}the batch: samples 17, 19, "
        f"21, 23)"
    )


def test_a_loss_per_sample(ranks: Ranks) -> None:
    ranks.start(GOOD["batches"], on_finding="warn")
    ranks.inspectors[0].step(torch.tensor([1.0, float("nan"), 2.0]), torch.ones(3, 6))
    ranks.inspectors[0].step(1.5)
    ranks.close()
    assert ranks.logged(
        "WARNING: loss is nan on rank 0 at step 1 (per-sample loss is not finite: place 1 of the batch)"
    )


def test_an_empty_batch(ranks: Ranks) -> None:
    with pytest.raises(InspectionError, match="rank 1 had an empty batch at step 5") as caught:
        ranks.train(
            GOOD["sampler"],
            spoil=lambda rank, step, batch: batch[:0] if (rank, step) == (1, 5) else batch,
        )
    assert caught.value.guilty_rank == 1


def test_a_finding_is_reported_once(ranks: Ranks) -> None:
    warnings = ranks.train(
        GOOD["sampler"],
        spoil=lambda rank, step, batch: batch[:0] if rank else batch,
        on_finding="warn",
    )
    empty = [text for text in warnings if "empty" in text]
    assert empty == ["rank 1 had an empty batch at step 1"]


def test_raise_applies_to_warnings(ranks: Ranks) -> None:
    ranks.start(SAME["no sampler"][0], on_finding="raise")
    found = []
    for batches in zip(*ranks.loaders, strict=True):
        for one, batch in zip(list(ranks.inspectors), batches, strict=True):
            try:
                one.step(1.0, batch)
            except InspectionError as error:
                found.append(error.kind)
        if ranks.inspectors[0]._steps == 8:
            wait_until(
                lambda: all(one._watcher.raised for one in ranks.inspectors), what="both ranks know"
            )
        if found:
            break
    assert found == ["overlap"] * 2


def test_sharded_parameters_are_not_compared(ranks: Ranks) -> None:
    def change(rank: int, step: int, model: torch.nn.Module) -> None:
        with torch.no_grad():
            model[1].weight += rank  # type: ignore[index,operator]

    make = torch.nn.Linear.reset_parameters

    def reset(layer: torch.nn.Linear) -> None:
        make(layer)
        if layer.in_features == 3:
            layer.weight.placements = ["a shard"]  # type: ignore[attr-defined]

    ranks._patch.setattr(torch.nn.Linear, "reset_parameters", reset)
    ranks._patch.setattr(copy, "deepcopy", _twin)
    assert ranks.train(GOOD["sampler"], change=change, on_finding="raise") == []
    assert ranks.logged("parameters that are not compared: 1 sharded") and ranks.logged(
        "step 8: all ranks train"
    )


def _twin(model: torch.nn.Module) -> torch.nn.Module:
    """deepcopy() drops attributes of parameters."""
    twin = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Linear(3, 1))
    twin.load_state_dict(model.state_dict())
    return twin


def test_ranks_with_different_parameters_are_not_compared(ranks: Ranks) -> None:
    numbers = iter((3, 5))
    ranks._patch.setattr(copy, "deepcopy", lambda model: torch.nn.Linear(6, next(numbers)))
    assert ranks.train(GOOD["sampler"], on_finding="raise") == []
    assert ranks.logged("parameters are not compared: the ranks hold different ones")


def test_an_inspected_model_can_be_saved_and_copied(ranks: Ranks, tmp_path: Path) -> None:
    model, _ = ranks.start(GOOD["batches"])
    torch.save(model, tmp_path / "whole.pt")
    code = (
        f"import torch; model = torch.load({str(tmp_path / 'whole.pt')!r}, "
        f"weights_only=False); "
        f"print(model(torch.ones(2, 6)).shape)"
    )
    done = python("-c", code, cwd=tmp_path, PYTHONPATH="")
    assert done.stdout == "torch.Size([2, 1])\n", done.stderr
    copy.deepcopy(model)(torch.ones(2, 6))
    assert not ranks.inspectors[0]._in_step, "a copy is another model"
    model(torch.ones(2, 6))
    assert ranks.inspectors[0]._in_step


def test_the_own_time_of_a_compiled_model() -> None:
    compiled = torch.compile(torch.nn.Linear(6, 1), backend="eager")
    one = DDPInspector(compiled, None)  # type: ignore[arg-type]
    for _ in range(25):
        loss = compiled(torch.ones(2, 6)).mean()
        loss.backward()
        one.step(loss)
    own, _, period = one._clock.medians() or (0, 0, 0)
    assert 0 < own <= period
    one.close()
    assert not compiled._forward_pre_hooks, "the model is restored"


def test_a_single_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model = torch.nn.Linear(6, 1)
    with DDPInspector(model, DataLoader(Samples(40), 4), every=2) as alone:
        for batch in alone._loader:
            alone.step(model(batch).mean(), batch)
    shown = capsys.readouterr().err
    assert "[inspector] one process, no other ranks" in shown
    assert (
        "[inspector] rank 0 of 1: 40 samples, 10 batches an epoch, SequentialSampler, first "
        "indices 0, 1, 2, 3" in shown
    )
    assert (
        re.search(r"step 10: rank 0: 4 samples, loss -?\d", shown)
        and "WARNING" not in shown
        and "parameters" not in shown
    )
    with pytest.raises(InspectionError, match="nan"), DDPInspector(model) as alone:
        alone.step(float("nan"))


def test_ranks_without_a_process_group_train_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    DDPInspector(torch.nn.Linear(6, 1)).close()
    assert (
        "WARNING: rank 2 trains alone: WORLD_SIZE is 4, but there is no process group"
        in capsys.readouterr().err
    )


def test_events_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    monkeypatch.setenv("DUET_RUN_DIR", str(tmp_path))
    ranks.train(SAME["no sampler"][0])
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events[:2]] == ["inspection"] * 2 and [
        e.get("rank") for e in events[:2]
    ] == [0, 1]
    (warning,) = [e for e in events if e["event"] == "warning"]
    assert warning["kind"] == "overlap" and "train on the same samples" in warning["text"]


def test_an_unwritable_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks
) -> None:
    (tmp_path / "events.jsonl").mkdir()
    monkeypatch.setenv("DUET_RUN_DIR", str(tmp_path))
    assert ranks.train(GOOD["sampler"]) == []
    assert sum("cannot write" in line for line in ranks.lines) == 1, "reported once"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_finding": "stop"}, "'auto', 'warn', 'raise'"),
        ({"every": -1}, "at least 0"),
        ({"slow": 1.0}, "above 1"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DDPInspector(torch.nn.Linear(6, 1), **options)
