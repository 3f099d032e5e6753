"""Findings of DDPInspector in a training loop of several ranks."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.cases import each
from tests.conftest import wait_until
from tests.unit.inspected_ranks import GOOD, SAME, Ranks, Samples, Stream, ranks, sharded
from training.inspector import InspectionError

__all__ = ["ranks"]  # a fixture


class Noisy(Samples):
    """Random augmentation: a sample is different each time."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + torch.randn(6)


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


def test_a_batch_of_one_sample(ranks: Ranks) -> None:
    def spoil(rank: int, step: int, batch: torch.Tensor) -> torch.Tensor:
        return batch * (float("inf") if (rank, step) == (1, 5) else 1)

    with pytest.raises(InspectionError) as caught:
        ranks.train(lambda rank: sharded(Samples(), rank, 1, shuffle=False), spoil=spoil)
    assert str(caught.value).endswith("input is not finite: sample 9; the batch: sample 9)")
    ranks.close()  # the watcher writes what it has
    assert ranks.logged("step 1: all ranks train: rank 0: 1 sample, loss ")


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
