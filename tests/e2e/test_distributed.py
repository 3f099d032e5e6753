"""Helpers for user scripts (training.inspector.distributed), in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, TOKEN
from training.host.placement import LOOPBACK

BODY = """
import sys, os
from datetime import timedelta
sys.path.insert(0, {root!r})
from training.inspector import distributed
from training.inspector.distributed import *
from training.inspector.distributed import BarrierError, cleanup
import torch
world = setup("cpu", timeout_s=20)
"""


def ranks(tmp_path: Path, token: str, size: int, body: str) -> list[tuple[int, str]]:
    """Runs `body` on `size` ranks; (status, output) of each."""
    import socket

    script = tmp_path / "script.py"
    script.write_text(BODY.format(root=str(ROOT)) + body)
    with socket.socket() as probe, socket.socket() as another:
        probe.bind((LOOPBACK, 0))
        another.bind((LOOPBACK, 0))
        port, other = probe.getsockname()[1], another.getsockname()[1]
    shared = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "OTHER_PORT": str(other),
        TOKEN: token,
    }
    shared["GLOO_SOCKET_IFNAME"] = "lo"
    started = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**shared, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(size)
    ]
    out = [p.communicate(timeout=180)[0] for p in started]
    return [(p.returncode, text) for p, text in zip(started, out, strict=True)]


def test_helpers_on_two_ranks(tmp_path: Path, token: str) -> None:
    body = """
assert get_world_size() == 2 and get_rank() == int(os.environ["RANK"]) and is_main_process() == (get_rank() == 0)
barrier("both here", 20)
assert all_reduce_mean(float(get_rank())) == 0.5
given = torch.tensor([1.0, 2.0]) * (get_rank() + 1)
assert torch.equal(all_reduce_mean(given), torch.tensor([1.5, 3.0]))
assert given[0] == get_rank() + 1, "the input stays as it was"
import torch.distributed as dist
won = torch.tensor(float(distributed.is_first("question")))
dist.all_reduce(won)
assert won == 1
barrier("end", 20)
cleanup()
cleanup()
print("fine")
"""
    assert [(s, t.strip()) for s, t in ranks(tmp_path, token, 2, body)] == [(0, "fine")] * 2


@pytest.mark.slow
def test_a_barrier_names_the_missing_rank_even_rank_0(tmp_path: Path, token: str) -> None:
    body = """
try:
    if get_rank() == 0:  # the store is in this process and must outlast the others' wait
        distributed._store.wait(["done/1", "done/2"], timedelta(seconds=40))
    else:
        barrier("before iteration", 2.0)
except BarrierError as error:
    print(error, flush=True)
    distributed._store.set(f"done/{get_rank()}", "")
os._exit(0)
"""
    results = ranks(tmp_path, token, 3, body)
    for rank in (1, 2):
        assert "barrier 'before iteration': rank 0 did not arrive within 2 s" in results[rank][1]


@pytest.mark.slow
def test_different_barriers_are_detected(tmp_path: Path, token: str) -> None:
    body = """
try:
    barrier("save" if get_rank() else "load", 10)
except BarrierError as error:
    print(error, flush=True)
all_reduce_mean(0.0)
os._exit(0)
"""
    for _, text in ranks(tmp_path, token, 2, body):
        assert "rank 0 at 'load', rank 1 at 'save'" in text


@pytest.mark.soak
def test_a_barrier_in_the_scripts_own_group(tmp_path: Path, token: str) -> None:
    body = """
import time
cleanup()
os.environ["MASTER_PORT"] = os.environ["OTHER_PORT"]  # the first store may still answer, and would never be complete
import torch.distributed as dist
dist.init_process_group("gloo")
if get_rank() == 0:
    time.sleep(1)
started = time.monotonic()
barrier("both", 20)
print(get_rank() == 0 or time.monotonic() - started > 0.5)
dist.destroy_process_group()
try:
    barrier("no group", 20)
except RuntimeError as error:
    print(error)
"""
    for status, text in ranks(tmp_path, token, 2, body):
        # torch reports on standard error that the other rank exited first.
        assert (
            status == 0 and "True" in text.splitlines() and "no process group: call setup()" in text
        )


@pytest.mark.soak
def test_the_first_rank_leaves_a_barrier_last(tmp_path: Path, token: str) -> None:
    """It hosts the store, which a slow rank must still be able to read."""
    body = """
import time
from training.inspector import distributed
store = distributed._store
if get_rank() == 1:
    class Slow:
        def __getattr__(self, name):
            return getattr(store, name)
        def get(self, key):
            time.sleep(1)
            return store.get(key)
    distributed._store = Slow()
barrier("end", 20)
print("through", flush=True)
os._exit(0)
"""
    assert [(s, t.strip()) for s, t in ranks(tmp_path, token, 2, body)] == [(0, "through")] * 2


def test_everything_works_without_a_group() -> None:
    body = (
        BODY.format(root=str(ROOT))
        + "barrier('x'); assert all_reduce_mean(2.5) == 2.5 and is_main_process(); cleanup(); "
        "print(world.backend)"
    )
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", body],
        capture_output=True,
        text=True,
        env=clean,
        timeout=180,
        check=False,
    )
    assert done.stdout.strip() == "none", done.stderr
