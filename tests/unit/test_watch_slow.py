"""Slow ranks of a script, by the times of their collectives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import each
from tests.unit.test_watch_samples import LIBRARY, look
from training.core.rundir import RunDir
from training.monitor.health import activity
from training.monitor.health.target import Target
from training.watchdog import slow_rank
from training.watchdog.probes import (
    flight_recorder,
    graph_capture,
    procfs,
    sampling,
    stacks,
    waits,
)
from training.watchdog.probes.flight_recorder import Arrival, CallKey
from training.watchdog.probes.stacks import Frame
from training.watchdog.slow_rank import SlowRankWatch


def called(*at_ms: float) -> dict[CallKey, Arrival]:
    """Collectives 1, 2, … of one group of gloo, called at these times."""
    times = [int(1e6 * ms) for ms in at_ms]
    return {("0", "gloo", number): Arrival(at, at) for number, at in enumerate(times, 1)}


def ran(*ms: float) -> dict[CallKey, Arrival]:
    """Collectives 1, 2, … of one group of NCCL, one every 10 ms, with these durations."""
    return {
        ("0", "nccl", number): Arrival(int(1e7 * number), int(-1e6 * own))
        for number, own in enumerate(ms, 1)
    }


def test_a_rank_that_is_always_last_is_slow() -> None:
    even = [10.0 * step for step in range(1, 41)]
    late = [ms + 4 for ms in even]
    found = slow_rank.compare({0: called(*even), 1: called(*late), 2: called(*even)})
    assert found and (found.rank, found.calls) == (1, 40)
    assert found.wait_s == pytest.approx(0.004) and found.share == pytest.approx(0.41, abs=0.02)
    assert slow_rank.compare({0: called(*even)}) is None
    last = int(1e6 * late[-1])
    assert slow_rank.compare({0: called(*even), 1: called(*late)}, last) is None, "nothing new"


def test_the_gpu_that_is_always_last_is_slow() -> None:
    found = slow_rank.compare({0: ran(*[5.0] * 40), 1: ran(*[1.0] * 40), 2: ran(*[6.0] * 40)})
    assert found and (found.rank, found.calls) == (1, 40)
    assert found.wait_s == pytest.approx(0.004) and found.share == pytest.approx(0.41, abs=0.02)
    assert slow_rank.compare({0: ran(*[5.0] * 40), 1: ran(*[4.5] * 40)}) is None
    assert slow_rank.compare({0: ran(*[1.0] * 40), 1: called()}) is None, "nothing in common"


def test_ranks_that_are_late_in_turns_or_rarely_are_not_slow() -> None:
    even = [10.0 * step for step in range(1, 41)]
    turns = [ms + 4 * (step % 2) for step, ms in enumerate(even)]
    other = [ms + 4 * ((step + 1) % 2) for step, ms in enumerate(even)]
    assert slow_rank.compare({0: called(*turns), 1: called(*other)}) is None
    once = [*even[:-1], even[-1] + 300]
    assert slow_rank.compare({0: called(*even), 1: called(*once)}) is None
    slightly = [ms + 1.2 for ms in even]
    assert slow_rank.compare({0: called(*even), 1: called(*slightly)}) is None


CAPTURE = """import torch
warm_up()
with (
    torch.device("cuda"),
    torch.cuda.graph(graph),
):
    loss = train_step(
        batch)
graph.replay()
"""


@pytest.mark.parametrize(("line", "captures"), [(2, False), (5, True), (7, True), (9, False)])
def test_a_block_that_captures_a_cuda_graph(tmp_path: Path, line: int, captures: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(CAPTURE)
    inside = Frame("/home/me/model.py", 3, "forward"), Frame(str(script), line, "main")
    assert graph_capture.captures(inside) is captures
    of_torch = Frame(f"{LIBRARY}/cuda/graphs.py", 9, "capture_end" if captures else "replay")
    assert graph_capture.captures([of_torch]) is captures


@each(
    ("source", "line", "captures"),
    [
        ("with graph(g):\n    step()\nstep()", 2, True),
        ("with graph(g):\n    step()\nstep()", 3, False),
        ("with _graph_context_wrapper(fwd_graph, pool=mempool):\n    step()", 2, True),
        ("with paragraph(g):\n    step()", 2, False),
        ("with open(f):  # then: with graph(g):\n    step()", 2, False),
        ("step()\ng.capture_begin()\nstep()\ng.capture_end()\nstep()", 1, False),
        ("step()\ng.capture_begin()\nstep()\ng.capture_end()\nstep()", 3, True),
        ("step()\ng.capture_begin()\nstep()\ng.capture_end()\nstep()", 5, False),
        ("g.capture_begin()\nstep()", 2, False),
        ("with graph(g:\n    step()", 2, False),
    ],
)
def test_code_that_captures_a_cuda_graph(
    source: str, line: int, captures: bool, tmp_path: Path
) -> None:
    (script := tmp_path / f"train{line}.py").write_text(source)
    waits.forget_lines()
    assert graph_capture.captures([Frame(str(script), line, "main")]) is captures


def test_a_file_is_parsed_once(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(CAPTURE)
    waits.forget_lines()
    before, inside, after = (Frame(str(script), line, "main") for line in (2, 3, 9))
    assert [graph_capture.captures([at]) for at in (before, inside, after)] == [False, True, False]
    assert graph_capture._captured.cache_info().misses == 1
    script.write_text(f"import os\n{CAPTURE}")
    waits.forget_lines()
    assert [graph_capture.captures([at]) for at in (before, inside, after)] == [False, False, True]


@pytest.mark.parametrize(
    ("gpu", "line", "read"), [(True, 7, []), (True, 9, [0, 1]), (False, 7, [0, 1])]
)
def test_no_recorder_is_read_while_a_rank_captures_a_cuda_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool, line: int, read: list[int]
) -> None:
    script, asked = tmp_path / "train.py", list[int]()
    script.write_text(CAPTURE)
    at = look(Frame(str(script), line, "main"), gpu=gpu, state="R")
    monkeypatch.setattr(procfs, "uses_gpu", lambda pid: gpu)
    monkeypatch.setattr(stacks, "dump", lambda pids: dict.fromkeys(pids, at.stack))

    def asks(rank: int) -> None:
        asked.append(rank)

    SlowRankWatch(60.0, asks, lambda text, rank: None)._compare({0: 10, 1: 11})
    assert asked == read
    sampling._newest(1, at, None, asks)
    assert asked == ([*read, 1] if gpu and read else read)
    asked.clear()
    monkeypatch.setattr(flight_recorder, "read", lambda ranks, rank: asks(rank))
    activity._calls(Target(RunDir(tmp_path), {}, {0: 10, 1: 11}, 2, 2, ""))
    assert asked == read
