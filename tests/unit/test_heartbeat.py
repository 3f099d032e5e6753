"""Heartbeat file: the current phase of a rank, readable at any time and after its end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import heartbeats
from tests.unit.conftest import clean_environment
from training.core import heartbeat
from training.core.heartbeat import STEP_PHASES, Heartbeat


def test_a_beat_is_read_as_written(tmp_path: Path) -> None:
    writer = Heartbeat(tmp_path / "rank7.bin", 7)
    writer.epoch, writer.step = 2, 397
    before = time.monotonic_ns(), time.time()
    writer.beat("forward")
    writer.beat("backward")
    beat = heartbeat.read(tmp_path / "rank7.bin")
    assert beat is not None
    assert (beat.rank, beat.pid, beat.beats, beat.epoch, beat.step, beat.phase) == (
        7,
        os.getpid(),
        2,
        2,
        397,
        "backward",
    )
    assert before[0] <= beat.monotonic_ns <= time.monotonic_ns()
    assert before[1] <= beat.wall_time <= time.time()
    assert 0 <= beat.age_s < 60


def test_phases_of_a_step_are_shown_with_the_step(tmp_path: Path) -> None:
    writer = Heartbeat(tmp_path / "rank0.bin", 0)
    writer.step = 397
    shown = {}
    for phase in (*STEP_PHASES, "barrier: before iteration", heartbeat.FINISHED):
        writer.beat(phase)
        shown[phase] = str(heartbeat.read(tmp_path / "rank0.bin"))
    assert shown["forward"] == "step 397: forward"
    assert all(shown[p] == f"step 397: {p}" for p in STEP_PHASES)
    assert shown["barrier: before iteration"] == "barrier: before iteration"
    assert shown[heartbeat.FINISHED] == heartbeat.FINISHED


def test_the_age_grows_from_the_last_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Heartbeat(tmp_path / "rank0.bin", 0).beat("evaluate")
    beat = heartbeat.read(tmp_path / "rank0.bin")
    assert beat is not None
    monkeypatch.setattr(time, "monotonic_ns", lambda: beat.monotonic_ns + 2_500_000_000)
    assert beat.age_s == 2.5
    # The clock of another boot must not give a negative age.
    monkeypatch.setattr(time, "monotonic_ns", lambda: beat.monotonic_ns - 10**12)
    assert beat.age_s == 0.0


def test_a_long_phase_is_truncated(tmp_path: Path) -> None:
    writer = Heartbeat(tmp_path / "rank0.bin", 0)
    writer.beat("é" * 100)
    assert heartbeat.read(tmp_path / "rank0.bin").phase == "é" * 48  # type: ignore[union-attr]
    writer.beat("short")
    assert heartbeat.read(tmp_path / "rank0.bin").phase == "short"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "content",
    [None, b"", b"DUET", b"\0" * 200, b"TEUD\2\0" + b"\1" * 200, b"DUET\1\0" + b"\1" * 200],
)
def test_empty_or_foreign_files_have_no_beat(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "rank0.bin").write_bytes(content)
    assert heartbeat.read(tmp_path / "rank0.bin") is None


def test_a_rank_before_its_first_beat_is_none(tmp_path: Path) -> None:
    Heartbeat(tmp_path / "rank0.bin", 0)
    assert heartbeat.read(tmp_path / "rank0.bin") is None


@pytest.mark.parametrize("at", [64, 256])
def test_a_record_that_is_being_written_is_not_read(at: int, tmp_path: Path) -> None:
    """A complete record always exists, even if the writer is stopped or killed while writing."""
    path = tmp_path / "rank0.bin"
    writer = Heartbeat(path, 0)
    writer.beat("forward")
    writer.beat("backward")
    whole = path.read_bytes()
    record = slice(at, at + heartbeat._RECORD.size)
    for content in (
        bytes(heartbeat._RECORD.size),
        whole[record][:40] + bytes(heartbeat._RECORD.size - 40),
        b"x" + whole[record][1:],
    ):
        path.write_bytes(whole[: record.start] + content + whole[record.stop :])
        beat = heartbeat.read(path)
        assert beat and (beat.phase, beat.beats) == {64: ("forward", 1), 256: ("backward", 2)}[at]


def test_a_read_with_two_torn_records_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rank0.bin"
    writer = Heartbeat(path, 0)
    for phase in ("fetch", "forward", "backward"):
        writer.beat(phase)
    whole = path.read_bytes()
    torn = bytearray(whole)
    for at in heartbeat._RECORDS_AT:
        torn[at] ^= 1
    readings = [bytes(torn), bytes(torn), whole]
    monkeypatch.setattr(heartbeat, "_read", lambda path, size: readings.pop(0)[:size])
    beat = heartbeat.read(path)
    assert beat and beat.phase == "backward" and readings == []
    monkeypatch.setattr(heartbeat, "_read", lambda path, size: bytes(torn)[:size])
    assert heartbeat.read(path) is None


def test_the_last_beat_is_kept_when_unreadable(tmp_path: Path) -> None:
    readings = heartbeat.Readings(tmp_path, range(2))
    assert readings.read() == []
    for rank in range(2):
        Heartbeat(tmp_path / f"rank{rank}.bin", rank).beat("forward")
    assert [b.rank for b in readings.read()] == [0, 1] and readings.unread == set()
    (tmp_path / "rank1.bin").unlink()
    assert [b.rank for b in readings.read()] == [0, 1] and readings.unread == {1}


def test_no_torn_reads_while_writers_are_preempted(tmp_path: Path) -> None:
    found = heartbeats.measured(tmp_path, beats=100_000, busy=4)
    assert (heartbeats.wrong(found), found["beats"]) == (0, 100_000), found
    assert found["readings"] > 100


def test_all_ranks_in_order(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        Heartbeat(tmp_path / f"rank{rank}.bin", rank).beat("forward")
    (tmp_path / "rank5.bin").write_bytes(b"")
    assert [b.rank for b in heartbeat.read_all(tmp_path)] == [0, 2, 10]
    assert heartbeat.read_all(tmp_path / "missing") == []


def test_a_hung_disk_has_no_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not end a healthy run."""
    for rank in range(3):
        Heartbeat(tmp_path / f"rank{rank}.bin", rank).beat("forward")

    def fails(*_: object, **__: object) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "glob", fails)
    assert [b.rank for b in heartbeat.read_all(tmp_path, range(1, 3))] == [1, 2], (
        "known ranks are read without listing the folder"
    )
    assert heartbeat.read_all(tmp_path) == []
    monkeypatch.setattr(Path, "open", fails)
    assert heartbeat.read_all(tmp_path, range(1, 3)) == []


def test_the_last_phase_of_a_killed_rank(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from training.core import heartbeat;"
        "heartbeat.start(Path(sys.argv[1]), 1); heartbeat.current.step = 5; "
        "heartbeat.current.beat('reduce');"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "rank1.bin")], env=clean_environment()
    )
    assert process.wait(60) == -9
    beat = heartbeat.read(tmp_path / "rank1.bin")
    assert beat is not None
    assert (str(beat), beat.pid) == ("step 5: reduce", process.pid)


def test_a_full_disk_raises_an_error_not_sigbus(
    on_small_disk: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = (
        "from pathlib import Path; from training.core.heartbeat import Heartbeat\n"
        "try: Heartbeat(Path('rank0.bin'), 0).beat('forward')\n"
        "except OSError as error: print(error.strerror)"
    )
    done = on_small_disk(
        "-c",
        code,
        options="size=1m",
        before="{ head -c 2097152 /dev/zero >filler; true; } 2>/dev/null",
    )
    assert (done.returncode, done.stdout) == (0, "No space left on device\n"), done.stderr


def test_beats_without_a_run_directory_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "current", heartbeat.NoHeartbeat())
    heartbeat.current.beat("anything")
    assert list(tmp_path.iterdir()) == []
    heartbeat.start(tmp_path / "rank0.bin", 0)
    heartbeat.current.beat("rendezvous with the other ranks")
    assert str(heartbeat.read(tmp_path / "rank0.bin")) == "rendezvous with the other ranks"


def test_durations_per_kind_of_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [10**9]
    monkeypatch.setattr("time.monotonic_ns", lambda: clock[0])
    writer = Heartbeat(tmp_path / "rank0.bin", 0)
    for epoch in range(100):
        writer.beat(f"epoch {epoch}: creating data iterator")
        clock[0] += 30_000_000 if epoch < 99 else 900_000_000
        writer.beat("forward")
        clock[0] += 2_000_000
    kinds = heartbeat.durations(tmp_path / "rank0.bin")
    assert set(kinds) == {"epoch #: creating data iterator", "forward"}
    creating = kinds["epoch #: creating data iterator"]
    assert sum(creating) == 100 and sum(kinds["forward"]) == 99, "the current phase is not counted"
    usual, longest = heartbeat.quantile_s(creating, 0.99), heartbeat.quantile_s(creating, 1.0)
    assert usual is not None and 0.030 <= usual <= 0.030 * 1.25
    assert longest is not None and 0.9 <= longest <= 0.9 * 1.25
    assert heartbeat.quantile_s((), 0.99) is None


def test_excess_kinds_of_phases_share_the_last_slot(tmp_path: Path) -> None:
    writer = Heartbeat(tmp_path / "rank0.bin", 0)
    for letter in range(60):
        writer.beat("phase " + chr(ord("A") + letter))
    kinds = heartbeat.durations(tmp_path / "rank0.bin")
    assert len(kinds) == 24 and sum(map(sum, kinds.values())) == 59


def test_the_place_is_counted_from_the_start_of_the_step(tmp_path: Path) -> None:
    writer = Heartbeat(tmp_path / "rank0.bin", 0)
    writer.beat("building the model")
    for step in (41, 42):
        writer.step = step
        for phase in ("fetch", "forward", "fetch", "forward", "backward"):
            writer.beat(phase)
    beat = heartbeat.read(tmp_path / "rank0.bin")
    assert beat and (beat.step, beat.place, beat.first_step) == (42, 5, 41)


def test_again_repeats_the_phase(tmp_path: Path) -> None:
    writer = heartbeat.Heartbeat(tmp_path / "rank0.bin", 0)
    writer.beat("evaluation")
    first = heartbeat.read(tmp_path / "rank0.bin")
    writer.again()
    second = heartbeat.read(tmp_path / "rank0.bin")
    assert first and second and second.monotonic_ns >= first.monotonic_ns
    assert (second.phase, second.beats, second.place) == (
        "evaluation",
        first.beats + 1,
        first.place,
    )
