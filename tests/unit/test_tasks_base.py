"""Samples of a task: drawn reproducibly, batched, moved to the device."""

from __future__ import annotations

import sys
import traceback
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
)

from tests.cases import each
from training.config.batch import Batch
from training.config.schema import Config
from training.data import device_copy
from training.data.loader import Batches, reading
from training.diagnose.traceback import carried
from training.tasks import base
from training.tasks.base import Samples, Task, moved


class Drawn(Dataset[Any]):
    """A number drawn at each read of a sample, like a random crop."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "value": torch.tensor(float(index)), "name": f"sample {index}"}

    def draw(self, index: int, random: np.random.Generator) -> dict[str, Any]:
        return {"index": index, "value": torch.tensor(random.random())}


def drawn(epoch: int = 0, seed: int = 1) -> list[float]:
    return Samples(Drawn(), seed, drawn=True).rows(range(24), epoch)["value"].tolist()


def test_a_sample_depends_only_on_seed_epoch_and_index() -> None:
    first = drawn()
    assert drawn() == first and len(set(first)) == 24
    samples = Samples(Drawn(), 1, drawn=True)
    assert samples.rows(np.array([7, 3]))["value"].tolist() == [first[7], first[3]], (
        "independent of earlier draws"
    )
    different = [*first, *drawn(epoch=1), *drawn(seed=2), *drawn(seed=0), *drawn(seed=-1)]
    assert len(set(different)) == 5 * 24


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(4.0)


class CountedStream(Stream):
    def __len__(self) -> int:
        return 4


class Given(Task):
    """`options.data`: of both parts."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> Dataset[Any]:
        return self.options.data

    def val_data(self) -> Dataset[Any]:
        return self.options.data

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch).mean()


def given(data: Any) -> Given:
    return Given(SimpleNamespace(data=data), Config(), torch.device("cpu"))


@each(
    "data",
    [Stream(), CountedStream(), DataLoader(TensorDataset(torch.arange(4))), iter(()), 4, {1}],
)
def test_data_without_an_index_is_refused(data: Any) -> None:
    for part in ("train", "val"):
        with pytest.raises(TypeError, match=rf"{part}_data\(\) of Given returned .* map-style"):
            given(data).rows(part)


def test_only_validation_data_may_be_missing() -> None:
    assert given(None).rows("val") is None
    with pytest.raises(TypeError, match=r"train_data\(\) of Given returned None; "):
        given(None).rows("train")
    rows = given([torch.zeros(2), torch.ones(2)]).rows("train")
    assert rows and len(rows) == 2 and rows.rows([1]).tolist() == [[1.0, 1.0]]


@each(
    ("samples", "named"),
    [
        (
            [torch.zeros(3), torch.zeros(3), torch.zeros(4)],
            "sample 12 is a tensor of the shape (4,)",
        ),
        ([None, torch.zeros(3), torch.zeros(3)], "sample 10 is None"),
        ([{"x": 1.0}, {"x": 2}, None], "sample 12 is None"),
        ([{"x": 1.0, "y": "a"}, {"x": 1.0, "y": "b"}, {"x": 1.0}], "sample 12 has no ['y']"),
        ([{"x": np.ones(2)}, {"x": torch.ones(2)}, {"x": np.ones(5)}], "(5,) in ['x']"),
        ([(1, [2, 3]), (1, [2, 3]), (1, [2])], "sample 12 has no [1][1]"),
        ([object(), object(), object()], "object"),
    ],
)
def test_samples_that_form_no_batch_are_named(samples: list[Any], named: str) -> None:
    data = given([None] * 10 + samples)
    for part in ("train", "val"):
        rows = data.rows(part)
        assert rows
        with pytest.raises(TypeError) as caught:
            rows.rows([10, 11, 12])
        text = str(caught.value)
        assert text.startswith(f"{part}_data() of Given ") and named in text, text
        assert "sample 11" not in text
        place = traceback.extract_tb(caught.tb)[-1]
        assert (place.filename, place.name) == (__file__, f"{part}_data")


class Growing(Drawn):
    """Another program adds files."""

    count = 3

    def __len__(self) -> int:
        self.count += 1
        return self.count


def test_the_length_of_a_data_set_is_asked_once() -> None:
    """The order of an epoch and the share of each rank depend on it."""
    data = given(Growing())
    for part, count in (("train", 4), ("val", 5)):
        rows = data.rows(part)
        assert rows and [len(rows), len(rows)] == [count, count]


class Labelled(Dataset[Any]):
    """Sample 2 has no label."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return next(label for label in (0, 1, 3) if label == index)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_does_not_end_the_data(workers: int) -> None:
    """A StopIteration is an error of that line, in a worker too."""
    data = given(Labelled()).rows("val")
    assert data
    keys = [(0, range(2)), (0, range(2, 4))]
    with (
        pytest.raises(RuntimeError, match=r"val_data\(\) of Given: sample 2 ") as caught,
        reading(data, keys, workers=workers) as rows,
    ):
        list(rows)
    if workers:
        found = carried(str(caught.value))
        assert (
            found and found.type == "RuntimeError" and (found.code or "").startswith("return next(")
        )
    else:
        place = traceback.extract_tb(caught.tb)[-1]
        assert (place.filename, place.name) == (__file__, "__getitem__")


class Cut(Labelled):
    """The file of sample 2 is damaged."""

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise EOFError("Ran out of input")
        return index


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
@pytest.mark.parametrize("workers", [0, 1])
def test_the_sample_that_cannot_be_read_is_named(workers: int) -> None:
    rows = given(Cut()).rows("train")
    assert rows
    with (
        pytest.raises(EOFError) as caught,
        reading(rows, [(0, range(4))], workers=workers) as found,
    ):
        list(found)
    shown = traceback.format_exception(caught.type, caught.value, caught.tb)
    assert shown[-1].rstrip().endswith(
        "EOFError: Ran out of input\nwhile reading sample 2 of train_data()"
    ) or (not workers and shown[-1].rstrip() == "while reading sample 2 of train_data()")


def test_an_error_of_equal_samples_is_not_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    full = RuntimeError("unable to write to file </torch_1>: No space left on device (28)")

    def collate(samples: list[Any]) -> Any:
        raise full

    monkeypatch.setattr(base, "default_collate", collate)
    with pytest.raises(RuntimeError) as caught:
        Samples(Drawn(), 1, drawn=True).rows([1, 2])
    assert caught.value is full


def test_validation_is_never_drawn() -> None:
    found = Samples(Drawn(), 1, drawn=False).rows([5, 2], epoch=3)
    assert found["value"].tolist() == [5.0, 2.0] and found["name"] == ["sample 5", "sample 2"]
    plain = Samples(TensorDataset(torch.arange(4)), 1, drawn=True)
    assert plain.rows([2, 0])[0].tolist() == [2, 0], "a dataset without random draws"


def test_samples_behind_a_subset_or_a_concatenation_are_drawn() -> None:
    first = drawn()
    for data, inner in (
        (Subset(Drawn(), [5, 3]), [5, 3]),
        (ConcatDataset([Drawn(), Subset(Drawn(), [7])]), [*range(24), 7]),
        (Subset(ConcatDataset([TensorDataset(torch.arange(2)), Drawn()]), [25, 4]), [23, 2]),
    ):
        count = len(inner)
        found = Samples(data, 1, drawn=True).rows(range(count))
        assert found["index"].tolist() == inner
        assert found["value"].tolist()[:24] == first[:count], "by the index in the whole data set"
        plain = Samples(data, 1, drawn=False).rows(range(count))
        assert plain["value"].tolist() == inner
    mixed = ConcatDataset([TensorDataset(torch.arange(2)), Drawn()])
    assert Samples(mixed, 1, drawn=True).rows([1])[0].tolist() == [1]


@pytest.mark.parametrize(
    ("world", "size", "micro", "workers"), [(2, 3, 1, 0), (1, 6, 1, 2), (3, 1, 2, 1)]
)
def test_samples_are_independent_of_ranks_and_workers(
    world: int, size: int, micro: int, workers: int
) -> None:
    """Each sample of an epoch occurs once, with the same random draw, and with another in the next
    epoch, also with persistent workers."""
    data = Samples(Drawn(), 1, drawn=True)
    for rank in range(world):
        batch = Batch(size, 1, world, micro)
        batches = Batches(data, batch, rank=rank, seed=5, workers=workers, persistent=workers > 0)
        for epoch in range(2):
            expected, indices = drawn(epoch), []
            for rows in batches.epoch(epoch, 0):
                assert rows["value"].tolist() == [expected[i] for i in rows["index"].tolist()]
                indices += rows["index"].tolist()
            assert (
                indices == batches.indices(epoch, 0, steps=4).tolist()
                and len(indices) == 24 // world
            )
        batches.close()


Point = namedtuple("Point", ["x", "y"])  # a possible sample of a user's dataset


def test_all_tensors_are_moved_and_types_kept() -> None:
    one = torch.ones(3)
    batch = {"a": one, "rest": [one, (one, "text")], "point": Point(one, 4)}
    found = moved(batch, torch.device("meta"))
    assert (
        found["a"].device.type
        == found["rest"][0].device.type
        == found["rest"][1][0].device.type
        == "meta"
    )
    assert (
        isinstance(found["rest"], list)
        and isinstance(found["rest"][1], tuple)
        and found["rest"][1][1] == "text"
    )
    assert (
        isinstance(found["point"], Point)
        and found["point"].x.device.type == "meta"
        and found["point"].y == 4
    )
    assert one.device.type == "cpu"


class Encoded(UserDict[str, Any]):
    """A dictionary with attributes, as tokenizers of Hugging Face return."""

    def __init__(self, data: dict[str, Any], words: int) -> None:
        super().__init__(data)
        self.words = words

    def __getattr__(self, name: str) -> Any:
        if name == "data":  # while it is copied
            raise AttributeError(name)
        return self.data[name]


@each(
    "batch",
    [
        Encoded({"ids": torch.ones(2)}, 7),
        OrderedDict(ids=torch.ones(2)),
        defaultdict(list, ids=torch.ones(2)),
    ],
)
def test_a_dictionary_of_another_type_keeps_it(batch: Any) -> None:
    found = moved(batch, torch.device("meta"))
    assert type(found) is type(batch)
    assert (found["ids"].device.type, batch["ids"].device.type) == ("meta", "cpu")
    if isinstance(found, Encoded):
        assert found.ids is found["ids"] and found.words == 7


class Host:
    """A tensor in host memory of which `most` may be pinned: records its copies."""

    device = torch.device("cpu")

    def __init__(self, size: int, *, most: int, pinned: bool, layout: torch.layout) -> None:
        self.size, self.most, self.pinned, self.layout = size, most, pinned, layout
        self.ways: list[str] = []

    def numel(self) -> int:
        return self.size

    def element_size(self) -> int:
        return 1

    def is_pinned(self) -> bool:
        return self.pinned

    def pin_memory(self) -> Host:
        self.ways.append("pin")
        if self.size > self.most:
            raise RuntimeError("CUDA error: out of memory")
        return self

    def to(self, device: torch.device, non_blocking: bool = False) -> Host:
        self.ways.append("asynchronous" if non_blocking else "plain")
        return self


def test_tensors_are_copied_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copy, "_refused", False)

    def ways(
        size: int,
        *,
        most: int = 1 << 40,
        trains: bool = False,
        pinned: bool = False,
        layout: torch.layout = torch.strided,
    ) -> list[str]:
        tensor = Host(size, most=most, pinned=pinned, layout=layout)
        with torch.set_grad_enabled(trains):
            device_copy.to_device(cast("torch.Tensor", tensor), torch.device("cuda"))
        return tensor.ways

    large = device_copy.PINNED_MOST + 1
    assert ways(large - 1) == ways(large, trains=True) == ["pin", "asynchronous"]
    assert ways(large) == ["plain"]  # a clip
    assert ways(large, pinned=True) == ["asynchronous"]
    assert ways(2, most=1, layout=torch.sparse_coo) == ["pin", "plain"]
    assert ways(2, most=1) == ["pin", "plain"]
    assert ways(1) == ["plain"]  # after a refusal
    assert ways(1, pinned=True) == ["asynchronous"]


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(5, 2), 5),
        ([torch.zeros(4), torch.zeros(9)], 4),
        ({"name": ["a", "b"], "x": (torch.zeros(2, 3),)}, 2),
        ([["a"], {}, torch.zeros(0, 7)], 0),
        ({"name": ["a", "b"]}, 0),
    ],
)
def test_samples_of_a_batch(batch: Any, count: int) -> None:
    assert Task.count(SimpleNamespace(), batch) == count  # type: ignore[arg-type]
