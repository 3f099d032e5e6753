"""Samples of a step by the draws of the loader's sampler; checksums of parameters."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from training.inspector import DDPInspector, checksum, pending_step, sample_tracker


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), 1.0])


def loader(**more: Any) -> Any:
    return DataLoader(Numbers(), **({"batch_size": 4, "shuffle": True} | more))


def watched(made: Any) -> sample_tracker.SamplerTrace:
    drawn = sample_tracker.watch(made)
    assert drawn is not None
    return drawn


@pytest.mark.parametrize(
    "workers",
    [{}, {"num_workers": 2, "prefetch_factor": 3}, {"num_workers": 1, "persistent_workers": True}],
)
def test_every_batch_has_its_indices(workers: dict[str, Any]) -> None:
    made = loader(**workers)
    drawn = watched(made)
    assert sample_tracker.watch(made) is None and len(made) == 3, "as before"
    for epoch in (1, 2):
        for number, batch in enumerate(made):
            assert not drawn.exhausted
            taken = drawn.took(len(batch))
            assert taken == (epoch, number + 1, [int(v) for v in batch[:, 0]])
        assert drawn.exhausted
    sample_tracker.unwatch(made, drawn)
    assert type(made.batch_sampler) is torch.utils.data.BatchSampler
    assert len(drawn.first) == 3 and sorted(i for batch in drawn.first for i in batch) == list(
        range(10)
    )


def test_a_loop_that_ends_early() -> None:
    made = loader()
    drawn = watched(made)
    for batch in made:
        drawn.took(len(batch))
        break
    assert drawn.exhausted
    first = next(iter(made))
    assert drawn.epoch == 2 and len(first) == 4


def test_a_batch_that_is_only_looked_at_begins_no_epoch() -> None:
    """On one rank, before or after an epoch: the epochs of the ranks are compared."""
    made = loader()
    drawn = watched(made)
    looked = next(iter(made))
    for epoch in (1, 2):
        for number, batch in enumerate(made):
            taken = drawn.took(len(batch))
            assert taken == (epoch, number + 1, [int(v) for v in batch[:, 0]])
        assert drawn.exhausted and drawn.epoch == epoch
        looked = next(iter(made))
        assert drawn.exhausted and drawn.trained == epoch
    assert len(looked) == 4 and len(drawn.first) == 3, "of the training"


def test_a_step_of_several_batches_has_no_indices() -> None:
    made = DataLoader(range(400), 4)
    drawn = watched(made)
    taken = [drawn.took(4) for number, _ in enumerate(made) if number % 4 == 3]
    assert taken[-1] is None, "unknown rather than wrong"
    assert watched(loader()).took(4) is None


class SkipBatchSampler(BatchSampler):
    """As accelerate's, which `skip_first_batches` and transformers use to resume an epoch."""

    def __init__(self, batch_sampler: Any, skip_batches: int) -> None:
        self.batch_sampler, self.skip_batches = batch_sampler, skip_batches

    def __iter__(self) -> Iterator[list[int]]:
        for index, samples in enumerate(self.batch_sampler):
            if index >= self.skip_batches:
                yield samples


@pytest.mark.parametrize("skipped", [1, 20])
def test_an_epoch_that_is_resumed_without_its_first_batches(skipped: int) -> None:
    made = DataLoader(range(100), 4, shuffle=True)
    drawn = watched(made)
    resumed = DataLoader(range(100), batch_sampler=SkipBatchSampler(made.batch_sampler, skipped))
    for epoch, batches, before in ((1, resumed, skipped), (2, made, 0)):
        for number, batch in enumerate(batches):
            assert drawn.took(len(batch)) == (epoch, before + number + 1, batch.tolist())
            assert number or epoch > 1 or drawn.first == [batch.tolist()]
        assert drawn.exhausted


def test_samples_are_known_again_after_an_epoch_whose_first_batches_had_no_step() -> None:
    made = DataLoader(range(100), 4)
    drawn = watched(made)
    assert [drawn.took(4) for n, _ in enumerate(made) if n >= 20] == [None] * 5
    assert [drawn.took(4) for _ in made] == [
        (2, n + 1, [*range(4 * n, 4 * n + 4)]) for n in range(25)
    ]


def test_batches_of_a_step_that_the_trainer_draws_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers 5, with gradient_accumulation_steps."""
    fake = SimpleNamespace(TrainerCallback=object)
    monkeypatch.setitem(sys.modules, "transformers", fake)
    monkeypatch.delitem(sys.modules, "training.inspector.transformers", raising=False)
    callback = importlib.import_module("training.inspector.transformers").InspectorCallback()
    monkeypatch.delitem(sys.modules, "training.inspector.transformers")
    taken: list[Any] = []
    took = sample_tracker.SamplerTrace.took
    monkeypatch.setattr(
        sample_tracker.SamplerTrace, "took", lambda *args: taken.append(took(*args)) or taken[-1]
    )
    model, made = torch.nn.Linear(2, 1), DataLoader(Numbers(), 1)
    args = SimpleNamespace(gradient_accumulation_steps=10)
    callback.on_train_begin(args, None, None, model=model, train_dataloader=made)
    for batch in list(made):
        model(batch)
        callback.on_substep_end(args, None, None)
    callback.on_train_end(args, None, None)
    assert taken == [(1, n + 1, [n]) for n in range(10)]


@pytest.mark.parametrize(("sampler", "known"), [("distributed", True), ("random", False)])
def test_an_epoch_that_had_begun_before(sampler: str, known: bool) -> None:
    more = (
        {"sampler": DistributedSampler(Numbers(), 2, 1, seed=5), "shuffle": None} if known else {}
    )
    made = loader(**more)
    running = iter(made)
    state = torch.get_rng_state()
    drawn = watched(made)
    drawn.begun(3)
    assert torch.equal(state, torch.get_rng_state())
    for number, batch in enumerate(running):
        assert drawn.took(len(batch)) == (
            (3, number + 1, [int(v) for v in batch[:, 0]]) if known else None
        )
    for batch in made:
        taken = drawn.took(len(batch))
        assert taken and taken[0] == 4 and taken[2] == [int(v) for v in batch[:, 0]]


def test_a_loader_whose_batches_are_those_of_all_ranks() -> None:
    """accelerate's dispatch_batches=True: rank 0 draws them and sends each rank its part."""
    made = type("DataLoaderDispatcher", (), {"base_dataloader": loader()})()
    assert sample_tracker.watch(made) is None
    facts = sample_tracker.describe(made, None)
    assert not facts["whole_dataset"] and facts["dataset"] == 10


def test_loaders_of_other_libraries() -> None:
    assert sample_tracker.watch([torch.ones(4)]) is None and sample_tracker.watch(None) is None
    assert sample_tracker.watch(loader(batch_size=None, shuffle=None)) is None
    assert sample_tracker.describe([1, 2], None) | {"fingerprint": ""} == {
        "dataset": None,
        "batches": 2,
        "sampler": "list",
        "whole_dataset": False,
        "fingerprint": "",
    }


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.ones(3, 2), 3),
        ({"a": {"b": [torch.ones(5), 1]}}, 5),
        ((torch.tensor(1.0), torch.ones(4, 1)), 4),
        (["text", "more", "words"], 3),
        ("text", None),
        (torch.ones(0, 4), 0),
        (None, None),
    ],
)
def test_the_number_of_samples_of_a_batch(batch: Any, size: int | None) -> None:
    assert sample_tracker.size(batch) == size


def kinds() -> list[torch.Tensor]:
    """Four samples, in tensors that lack most operations."""
    table = torch.eye(4)
    rows = [torch.ones(length, 2) for length in (1, 2, 3, 4)]
    return [
        table.to_sparse(),
        table.to_sparse_csr(),
        torch.nested.nested_tensor(rows),
        torch.nested.nested_tensor(rows, layout=torch.jagged),
        torch.ones(4, 2, device="meta"),
        torch.quantize_per_tensor(table, 0.1, 0, torch.quint8),
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")  # prototypes, deprecated
def test_batches_whose_values_cannot_be_examined() -> None:
    for odd in kinds():
        assert sample_tracker.size(odd) == 4 and sample_tracker.size([odd, torch.ones(9)]) == 4
        assert sample_tracker.digests(odd, 4) == []
        assert len(sample_tracker.digests({"a": odd, "b": torch.arange(4)}, 4)) == 4
        assert sample_tracker.not_finite(odd, None, 4) == ([], [])
        assert sample_tracker.fingerprint([odd]) != sample_tracker.fingerprint([torch.ones(4)])


def test_one_sample_and_several_are_named() -> None:
    indices = [9, 113, 115, 117]
    assert pending_step._named([1], indices) == "sample 113"
    assert pending_step._named([1, 2], indices) == "samples 113, 115"
    assert pending_step._named([1], []) == "place 1 of the batch"
    assert pending_step._named([1, 2], []) == "places 1, 2 of the batch"


def test_an_inspection_that_failed_in_its_first_step_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(batch: object) -> int:
        raise RuntimeError("of a batch")

    inspected = DDPInspector(torch.nn.Linear(2, 2))
    monkeypatch.setattr(sample_tracker, "size", fails)
    with pytest.raises(RuntimeError, match="of a batch"):
        inspected.step(batch=torch.ones(2, 2))
    inspected.close()


def test_digests_are_of_the_content() -> None:
    table = torch.randn(4, 3, 5000).to(torch.bfloat16)
    found = sample_tracker.digests({"labels": torch.ones(4), "audio": table}, 4)
    assert len(set(found)) == 4 and sample_tracker.digests([table.flip(0)], 4) == found[::-1]
    table[2] = 0
    assert len(sample_tracker.digests(table, 4)) == 3, "silence has no digest"
    assert (
        sample_tracker.digests(torch.tensor(1.0), 1) == []
        and sample_tracker.digests(["text"], 1) == []
    )
    assert len(set(sample_tracker.digests(torch.randn(2, 3, dtype=torch.complex64), 2))) == 2


def test_fingerprints_distinguish_datasets() -> None:
    class Files(Dataset[int]):
        def __init__(self, files: list[str]) -> None:
            self.files = files

    names = [f"{n}.wav" for n in range(100)]
    assert sample_tracker.fingerprint(Files(names)) == sample_tracker.fingerprint(
        Files(list(names))
    )
    parts = [sample_tracker.fingerprint(Files(names[rank::2])) for rank in range(2)]
    subsets = [
        sample_tracker.fingerprint(torch.utils.data.Subset(Files(names), range(rank, 100, 2)))
        for rank in range(2)
    ]
    tensors = [
        sample_tracker.fingerprint(torch.utils.data.TensorDataset(torch.arange(n, n + 9)))
        for n in range(2)
    ]
    assert len({*parts, *subsets, *tensors, sample_tracker.fingerprint(Files(names))}) == 7


DTYPES = [torch.float32, torch.bfloat16]
TYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", TYPES)
def test_checksums_of_every_type_detect_a_change(dtype: torch.dtype) -> None:
    values = torch.arange(12).reshape(3, 4).to(dtype)
    other = values.clone()
    other[2, 1] = 0
    turned = values.t().contiguous().t()
    same = checksum.of_tensors([values, turned, values[::2], torch.ones(0)]).tolist()
    assert same[0] == checksum.of_tensors([turned]).tolist()[0]
    assert checksum.of_tensors([other]).tolist()[0] != same[0] and same[3] == 0
    assert all(0 <= number < 1 << checksum.BITS for number in same)
    passes = checksum._by_passes([values, turned, values[::2], torch.ones(0)]).tolist()
    assert passes[0] == checksum._by_passes([turned]).tolist()[0] and passes[3] == 0
    assert passes[0] != checksum._by_passes([other]).tolist()[0]


@pytest.mark.slow  # 2 s: imports the shapes of all operations
def test_a_gpus_checksum_takes_few_kernels_of_bounded_size() -> None:
    """Of 200 small tensors and one of 20 M values; on the meta device only shapes exist."""
    seen: list[int] = []

    class Kernels(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = func(*args, **(kwargs or {}))
            views = ("detach", "view", "slice", "alias", "empty")
            if not any(word in func.name() for word in views):
                first = found if isinstance(found, torch.Tensor) else None
                seen.append(0 if first is None else first.nbytes)
            return found

    small = [torch.empty(64, 3 + i % 5, dtype=DTYPES[i % 2], device="meta") for i in range(200)]
    tensors = [*small, torch.empty(20 << 20, device="meta")]
    checksum.of_tensors(tensors)  # copies factors to the device
    with Kernels():
        checksum.of_tensors(tensors)
    assert len(seen) <= 40 and max(seen) <= 8 * checksum.PASS
