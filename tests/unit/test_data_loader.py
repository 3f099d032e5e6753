"""Batches: every step has the same samples for any number of ranks, workers or shards, and after a
resume."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.cases import each
from tests.unit.conftest import python
from training.config.batch import Batch
from training.core.errors import Exit, UserError
from training.data.batch_dataset import BatchDataset
from training.data.loader import Batches
from training.data.permutation import EpochPermutation, digest
from training.data.prepared_corpus import PreparedCorpus
from training.data.token_dataset import TokenDataset, arrive, dataset, pair
from training.host import process

SEQ = 8


def shards(folder: Path, tokens: int, size: int = 1 << 20, kind: str = "<u2") -> list[Path]:
    """Tokens that encode their position, in shards of `size`."""
    values, paths = np.arange(tokens).astype(kind), []
    for number, start in enumerate(range(0, tokens, size)):
        paths.append(folder / f"train_{number:05d}.bin")
        values[start : start + size].tofile(paths[-1])
    return paths


@pytest.fixture
def data(tmp_path: Path) -> TokenDataset:
    """103 tokens: 12 sequences of 8, and a remainder."""
    return TokenDataset(shards(tmp_path, 103), SEQ)


def batches(
    data: TokenDataset,
    *,
    rank: int = 0,
    world: int = 1,
    size: int = 2,
    micro: int = 1,
    workers: int = 0,
    persistent: bool = False,
) -> Batches:
    batch = Batch(size, data.seq_len, world, micro)
    return Batches(
        data, batch, rank=rank, seed=3, workers=workers, persistent=persistent, arrive=pair
    )


def firsts(found: Batches, epoch: int = 0, used: int = 0) -> list[list[int]]:
    """The sequences of each micro-batch, read from their first tokens."""
    return [(inputs[:, 0] // SEQ).tolist() for inputs, _ in found.epoch(epoch, used)]


# ── the dataset
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sequence_and_its_targets(data: TokenDataset) -> None:
    assert len(data) == 12
    inputs, targets = data[1]
    assert inputs.tolist() == list(range(8, 16))
    assert targets.tolist() == list(range(9, 17))
    assert inputs.dtype == targets.dtype == torch.int64
    inputs, targets = data.batch([11, 0])
    assert inputs.shape == targets.shape == (2, SEQ)
    assert inputs[0].tolist() == list(range(88, 96))
    assert targets[0, -1] == 96
    for wrong in (12, 100):
        with pytest.raises(IndexError):
            data[wrong]


@each("size", [1, 8, 9, 50, 103])
def test_a_sequence_may_cross_shards(size: int, data: TokenDataset, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    parted = TokenDataset(shards(folder, 103, size), SEQ)
    assert len(parted) == 12
    everything = np.arange(12)
    for one, other in zip(parted.batch(everything), data.batch(everything), strict=True):
        assert torch.equal(one, other)
    if size < 103:
        with pytest.raises(IndexError):
            parted[12]


@each(("tokens", "sequences"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2)])
@each("size", [5, 100])
def test_the_last_sequence_needs_its_target(
    tokens: int, sequences: int, size: int, tmp_path: Path
) -> None:
    data = TokenDataset(shards(tmp_path, tokens, size), SEQ)
    assert len(data) == sequences
    for index in range(sequences):
        inputs, targets = data[index]
        assert len(inputs) == len(targets) == SEQ


def test_tokens_are_unsigned(tmp_path: Path) -> None:
    np.full(9, 65535, "<u2").tofile(tmp_path / "two.bin")
    assert TokenDataset([tmp_path / "two.bin"], SEQ)[0][0].tolist() == [65535] * 8
    np.full(9, (1 << 32) - 1, "<u4").tofile(tmp_path / "four.bin")
    assert (
        TokenDataset([tmp_path / "four.bin"], SEQ, token_bytes=4)[0][0].tolist()
        == [(1 << 32) - 1] * 8
    )


def test_the_dataset_of_a_prepared_corpus(tmp_path: Path) -> None:
    shards(tmp_path, 103, 50, "<u4")
    made = PreparedCorpus(str(tmp_path), "x", 1, 103, 0, token_bytes=4, shard_tokens=50)
    assert dataset(made, "train", SEQ).batch([11])[1].tolist() == [list(range(89, 97))]
    assert len(dataset(made, "val", SEQ)) == 0


@pytest.mark.parametrize("damage", ["cut", "longer", "lost"])
def test_a_shard_of_another_size_is_named(damage: str, tmp_path: Path) -> None:
    paths = shards(tmp_path, 103, 50)
    if damage == "lost":
        paths[1].unlink()
    else:
        with paths[1].open("r+b") as file:
            file.truncate(98 if damage == "cut" else 102)
    with pytest.raises(UserError) as caught:
        dataset(PreparedCorpus(str(tmp_path), "x", 1, 103, 0, shard_tokens=50), "train", SEQ)
    (problem,) = caught.value.problems
    assert caught.value.code == Exit.RESOURCES
    assert str(paths[1]) in problem.what
    if damage != "lost":
        assert "not 100" in problem.what


OPEN = """
import os, resource, sys
from pathlib import Path
from training.data.token_dataset import TokenDataset
paths = sorted(Path(sys.argv[1]).iterdir())
before = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (before + 9, before + 9))
data = TokenDataset(paths, 8)
found = [data[index][0].tolist() for index in (0, len(data) - 1)]
mapped = lambda: Path("/proc/self/maps").read_text().count(sys.argv[1])
print(len(paths), found, len(os.listdir("/proc/self/fd")) - before, mapped(), end=" ")
del data
print(mapped())
"""


def test_more_shards_than_open_files(tmp_path: Path) -> None:
    """A mapped shard is not an open file, of which the usual limit is 1024."""
    shards(tmp_path, 10 * 80 + 1, 10)
    done = python("-c", OPEN, str(tmp_path))
    assert done.stdout == f"81 {[[*range(8)], [*range(792, 800)]]} 0 81 0\n", done.stderr


def test_it_works_with_torch_data_loaders(data: TokenDataset) -> None:
    inputs, targets = next(iter(DataLoader(data, batch_size=3)))
    assert torch.equal(inputs, data.batch([0, 1, 2])[0]) and torch.equal(
        targets, data.batch([0, 1, 2])[1]
    )


# ── each rank's share
# ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_step_has_the_same_samples_for_every_number_of_ranks(tmp_path: Path) -> None:
    data = TokenDataset(shards(tmp_path, 24 * 5 * SEQ + 40), SEQ)
    ways = [
        (1, 24, 1),
        (1, 4, 6),
        (2, 12, 1),
        (2, 3, 4),
        (3, 8, 1),
        (4, 2, 3),
        (8, 3, 1),
        (24, 1, 1),
    ]
    for epoch in range(2):
        expected = EpochPermutation(len(data), 3, epoch).indices(0, 120).reshape(5, 24)
        for world, size, micro in ways:
            parts = [
                firsts(batches(data, rank=rank, world=world, size=size, micro=micro), epoch)
                for rank in range(world)
            ]
            assert {len(part) for part in parts} == {5 * micro}, (
                "the same number for all: no rank waits for ever"
            )
            for step in range(5):
                taken = [part[step * micro + m] for m in range(micro) for part in parts]
                assert [index for one in taken for index in one] == expected[step].tolist()


@pytest.mark.parametrize("workers", [0, 1])
def test_indices_match_the_samples_of_a_step(workers: int, tmp_path: Path) -> None:
    data = TokenDataset(shards(tmp_path, 24 * 3 * SEQ + 1), SEQ)
    parts = [
        batches(data, rank=rank, world=3, size=2, micro=4, workers=workers) for rank in range(3)
    ]
    for rank, part in enumerate(parts):
        found = firsts(part, 1)
        for step in range(3):
            taken = part.indices(1, step * 24)
            assert [
                index for one in found[4 * step : 4 * step + 4] for index in one
            ] == taken.tolist()
            assert parts[0].indices(1, step * 24, rank).tolist() == taken.tolist()
    for used in (0, 24, 48):
        shares = [digest(part.indices(1, used)) for part in parts]
        assert (
            sum(shares) % (1 << 64)
            == digest(EpochPermutation(72, 3, 1).indices(used, used + 24))
            == digest(EpochPermutation(72, 3, 1).indices(used, used + 24))
        )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_epoch_continues_exactly_where_it_stopped(
    workers: int, data: TokenDataset
) -> None:
    whole = firsts(batches(data, micro=2), 4)
    for step in range(4):
        assert firsts(batches(data, micro=2, workers=workers), 4, step * 4) == whole[2 * step :]


def test_a_resume_with_another_total_batch_repeats_no_samples(data: TokenDataset) -> None:
    order = EpochPermutation(12, 3, 0).indices(0, 12).tolist()
    assert [i for one in firsts(batches(data, size=3), 0, 4) for i in one] == order[4:10]
    assert (
        firsts(batches(data, size=3), 0, 10)
        == firsts(batches(data), 0, 12)
        == firsts(batches(data), 0, 500)
        == []
    )


def test_an_incomplete_step_is_skipped(data: TokenDataset) -> None:
    assert [len(one) for one in firsts(batches(data, size=5))] == [5, 5]
    assert firsts(batches(data, size=13)) == []


def test_epochs_differ(data: TokenDataset) -> None:
    assert firsts(batches(data), 1) != firsts(batches(data), 2)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_do_not_change_the_batches(persistent: bool, data: TokenDataset) -> None:
    found = batches(data, workers=2, persistent=persistent)
    plain = batches(data)
    for epoch in range(3):
        for one, other in zip(found.epoch(epoch, 0), plain.epoch(epoch, 0), strict=True):
            assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
            assert one[0].dtype == torch.int64


def test_an_abandoned_epoch_does_not_affect_the_next(data: TokenDataset) -> None:
    for workers, persistent in ((0, False), (2, False), (2, True)):
        found = batches(data, workers=workers, persistent=persistent)
        next(found.epoch(0, 0))
        assert firsts(found, 1) == firsts(batches(data), 1)


def test_an_epoch_of_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = TokenDataset(shards(tmp_path, 1000 * SEQ + 1), SEQ)
    whole = firsts(batches(data, size=4, micro=2))
    monkeypatch.setattr("training.data.loader.BLOCK", 24)
    assert firsts(batches(data, size=4, micro=2)) == whole
    assert [i for one in whole for i in one] == EpochPermutation(1000, 3, 0).indices(
        0, 1000
    ).tolist()


def test_global_random_state_is_unchanged(data: TokenDataset) -> None:
    state, threads = torch.get_rng_state(), set(threading.enumerate())
    found = batches(data).epoch(0, 0)
    next(found)
    assert set(threading.enumerate()) <= threads
    firsts(batches(data))
    firsts(batches(data, workers=1))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_worker_whose_rank_died_during_the_fork_exits_at_once() -> None:
    """torch compares with the parent that a worker has at its start; if that is not the rank, the
    worker would never end."""
    code = (
        "import os; from training.data.loader import start_worker; start_worker(os.getpid(), "
        "0); print('still here')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


class EndsProgram(BatchDataset):
    """Each batch: the statuses of programs that were asked to end. The worker itself is too."""

    def __len__(self) -> int:
        return 2

    def rows(self, indices: Any, epoch: int = 0) -> list[int]:
        statuses = []
        for number in process.STOP_SIGNALS:
            os.kill(os.getpid(), number)
            with subprocess.Popen(["sleep", "10"]) as program:
                program.send_signal(number)
            statuses.append(program.returncode)
        return statuses


def test_a_program_that_a_worker_has_started_can_be_ended() -> None:
    batch = Batch(1, 1, 1, 1)
    found = Batches(EndsProgram(), batch, rank=0, seed=1, workers=1, persistent=False)
    assert list(found.epoch(0, 0)) == [[-number for number in process.STOP_SIGNALS]] * 2


ENDING = """
import sys
import numpy as np
from pathlib import Path
from training.config.batch import Batch
from training.data.loader import Batches
from training.data.token_dataset import TokenDataset, pair
path = Path(sys.argv[1])
data = TokenDataset([path], 8)
batches = Batches(data, Batch(2, 8, 1, 1), rank=0, seed=1, workers=2, persistent=sys.argv[2] == "persistent", arrive=pair)
held = [batches, batches.epoch(0, 0)]
held.append(held)
next(held[1])
print("end", flush=True)
"""


@pytest.mark.parametrize("kind", ["persistent", pytest.param("not", marks=pytest.mark.slow)])
def test_a_program_with_running_workers_ends(kind: str, tmp_path: Path) -> None:
    (path,) = shards(tmp_path, 1000)
    done = python("-c", ENDING, str(path), kind)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


@pytest.mark.parametrize("workers", [0, 1])
def test_closed_batches_return_nothing(workers: int, data: TokenDataset) -> None:
    found = batches(data, workers=workers)
    epoch = found.epoch(0, 0)
    next(epoch)
    found.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(epoch)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_copied_whole_and_split_on_the_device(workers: int, data: TokenDataset) -> None:
    """Slices of rows are not contiguous: a GPU would get them through pageable memory. The meta
    device shows the strides."""
    to_meta = functools.partial(arrive, device=torch.device("meta"))
    found = Batches(
        data, Batch(2, SEQ, 1, 1), rank=0, seed=3, workers=workers, persistent=False, arrive=to_meta
    )
    for part in next(found.epoch(0, 0)):
        assert (
            part.device.type == "meta" and part.shape == (2, SEQ) and part.stride() == (SEQ + 1, 1)
        )
    found.close()
