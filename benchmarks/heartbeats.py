"""Stress test of heartbeat reads: two writers beat as fast as possible, a reader reads both files
all the time, and busy processes preempt all three at random points.

    python -m benchmarks.heartbeats [--beats=1e7] [--busy=4]

All values of a beat follow from its number, so that a mixture of two beats is detected. Exit status
1 if a read was torn, missing or older than the previous one, or a histogram was misread.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, environment
from training.core import heartbeat
from training.core.heartbeat import Heartbeat, HeartbeatRecord

WRITERS = 2
PHASES = tuple(chr(ord("a") + n) * (1 + 5 * n) for n in range(20))  # of all lengths
BUSY = "while True: pass"
DURATIONS_EVERY = 50  # readings


def write(path: Path, rank: int, beats: int) -> None:
    writer = Heartbeat(path, rank)
    began = time.thread_time_ns()
    for number in range(1, beats + 1):
        writer.epoch, writer.step = 3 * number, number
        writer.beat(PHASES[number % len(PHASES)])
    print((time.thread_time_ns() - began) / beats)


def expected(beat: HeartbeatRecord, rank: int, pid: int) -> bool:
    number, wall_ns = beat.beats, time.time_ns() - time.monotonic_ns() + beat.monotonic_ns
    return (
        (beat.rank, beat.pid) == (rank, pid)
        and (beat.epoch, beat.step, beat.place, beat.first_step) == (3 * number, number, 1, 1)
        and beat.phase == PHASES[number % len(PHASES)]
        and abs(wall_ns / 1e9 - beat.wall_time)
        < 60  # the writer may be preempted between the two clocks
    )


def spoiled(before: dict[str, int], counts: dict[str, int]) -> bool:
    return not counts.keys() <= set(map(heartbeat.kind, (p[:64] for p in PHASES))) or any(
        counts.get(k, 0) < n for k, n in before.items()
    )


def measured(folder: Path, beats: int, busy: int) -> Counter[str]:
    """`beats`: total of all writers."""
    found, nanoseconds = Counter[str](), []
    neighbours = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(busy)]
    command = [sys.executable, "-m", "benchmarks.heartbeats", f"--beats={beats / WRITERS}"]
    paths = [folder / f"rank{rank}.bin" for rank in range(WRITERS)]
    writers = [
        subprocess.Popen(
            [*command, f"--write={path}", f"--rank={rank}"],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, path in enumerate(paths)
    ]
    try:
        last: dict[int, int] = {}
        sums: list[dict[str, int]] = [{} for _ in paths]
        while any(writer.poll() is None for writer in writers):
            for rank, (path, writer) in enumerate(zip(paths, writers, strict=True)):
                beat = heartbeat.read(path)
                if beat is None and rank not in last:
                    continue  # it starts
                found["readings"] += 1
                if beat is None:
                    found["absent"] += 1
                    continue
                found["torn"] += not expected(beat, rank, writer.pid)
                found["older than before"] += beat.beats < last.get(rank, 0)
                last[rank] = beat.beats
                if found["readings"] % DURATIONS_EVERY == 0:
                    counts = {
                        name: sum(histogram)
                        for name, histogram in heartbeat.durations(path).items()
                    }
                    found["histograms"] += 1
                    found["histograms misread"] += spoiled(sums[rank], counts)
                    sums[rank] = counts
        for rank, writer in enumerate(writers):
            assert writer.stdout
            nanoseconds.append(float(writer.stdout.read()))
            beat = heartbeat.read(paths[rank])
            found["beats"] += beat.beats if beat else 0
    finally:
        started: list[subprocess.Popen[Any]] = [*neighbours, *writers]  # bytes or text
        for process in started:
            process.kill()
            process.wait()
    found["CPU ns per beat"] = round(sum(nanoseconds) / len(nanoseconds))
    return found


def wrong(found: Counter[str]) -> int:
    return sum(
        found[name] for name in ("torn", "absent", "older than before", "histograms misread")
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beats", type=float, default=1e7, help="total of both writers")
    parser.add_argument("--busy", type=int, default=4, help="processes that spin")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.write:
        write(wanted.write, wanted.rank, int(wanted.beats))
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), int(wanted.beats), wanted.busy)
    for name in (
        "beats",
        "readings",
        "histograms",
        "torn",
        "absent",
        "older than before",
        "histograms misread",
        "CPU ns per beat",
    ):
        print(f"{name:<24}{found[name]:,}")
    print(f"{'seconds':<24}{time.monotonic() - began:.0f}")
    sys.exit(bool(wrong(found)))


if __name__ == "__main__":
    main()
