"""The order in which the host queues batches and steps on a GPU: of stub streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from weakref import WeakSet

import pytest
import torch

from training.trainer.prefetch import ahead

STEPS, COPIES = "steps", "copies"


def test_the_next_batch_is_copied_beside_the_step_that_uses_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queued: list[tuple[str, str, object]] = []  # stream, what, of which batch or for which stream
    device = torch.device("cuda", 1)

    class Stream:
        def __init__(self, on: torch.device, name: str = COPIES) -> None:
            assert on == device
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            queued.append((self.name, "wait", other.name))

    current = [Stream(device, STEPS)]

    def current_stream(on: torch.device) -> Stream:
        assert on == device
        return current[-1]

    @contextmanager
    def stream(other: Stream) -> Iterator[None]:
        current.append(other)
        yield
        current.pop()

    def arrive(batch: int) -> int:
        queued.append((current[-1].name, "copy", batch))
        return -batch

    for name, stub in (("Stream", Stream), ("current_stream", current_stream), ("stream", stream)):
        monkeypatch.setattr(torch.cuda, name, stub)

    def read() -> Iterator[int]:
        """A data set on the GPU queues what makes its batches."""
        for batch in (1, 2, 3):
            queued.append((current[-1].name, "read", batch))
            yield batch

    for batch in ahead(read(), arrive, device):
        queued.append((current[-1].name, "use", -batch))
    there, free = (STEPS, "wait", COPIES), (COPIES, "wait", STEPS)
    assert queued == [
        *((STEPS, "read", 1), free, (COPIES, "copy", 1)),
        # what uses the first batch waits for its copy alone, the next copy for no step
        *(there, (STEPS, "read", 2), free, (COPIES, "copy", 2), (STEPS, "use", 1)),
        *(there, (STEPS, "read", 3), free, (COPIES, "copy", 3), (STEPS, "use", 2)),
        *(there, free, (STEPS, "use", 3)),
    ]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that do nothing."""

    class Stream:
        def __init__(self, on: torch.device) -> None: ...
        def wait_stream(self, other: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda other: nullcontext())


@pytest.mark.usefixtures("streams")
def test_a_batch_is_released_before_the_next_copy() -> None:
    class Arrived: ...

    there: WeakSet[Arrived] = WeakSet()
    counts = []

    def arrive(batch: int) -> Arrived:
        there.add(arrived := Arrived())
        counts.append(len(there))
        return arrived

    batches = ahead(iter(range(4)), arrive, torch.device("cuda"))
    for _ in range(4):
        next(batches)
    assert counts == [1, 2, 2, 2]


@pytest.mark.usefixtures("streams")
def test_a_batch_as_it_was_read_lives_until_its_copy_has_been_made() -> None:
    """Otherwise a step would take the memory that the copy still reads."""

    class Read:
        def __init__(self) -> None:
            counts.append(len(there))  # the steps wait for the copy before
            there.add(self)

    there: WeakSet[Read] = WeakSet()
    counts = list[int]()
    read = (Read() for _ in range(3))
    for _ in ahead(read, lambda batch: object(), torch.device("cuda")):
        counts.append(len(there))  # of the next batch, which is being copied
    assert counts == [0, 0, 1, 0, 1, 0]


@pytest.mark.usefixtures("streams")
def test_an_error_of_the_next_batch_does_not_end_the_step_before() -> None:
    def read() -> Iterator[int]:
        yield from (1, 2)
        raise ValueError("damaged")

    batches = ahead(read(), lambda batch: -batch, torch.device("cuda"))
    assert [next(batches), next(batches)] == [-1, -2]
    with pytest.raises(ValueError, match="damaged") as error:
        next(batches)
    assert error.traceback[-1].name == "read"


@pytest.mark.usefixtures("streams")
def test_without_batches_nothing_is_copied() -> None:
    assert list(ahead(iter(()), lambda batch: batch, torch.device("cuda"))) == []
