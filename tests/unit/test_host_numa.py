"""NUMA nodes: the cores of a rank by the node of its GPU, and the binding itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cases import each
from tests.unit.conftest import ENHANCED, LAUNCH, ask, only, python, wrong
from training.core.errors import UserError
from training.core.messages import msg
from training.host import numa, process
from training.host.gpus import Gpu
from training.launcher import spawn
from training.plan import request, script_request


def gpu(index: int, node: int | None) -> Gpu:
    return Gpu(index, f"GPU-{index}", "-", 1, 1, 0, None, None, numa_node=node)


def choose(
    asked: int | str, launcher: str, device: str, gpus: Sequence[Gpu], ranks: int
) -> numa.NumaPlan:
    return numa.choose(asked, launcher, device, gpus, ranks, "from c.py:1")


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes of four cores and one of memory only; this process may not use core 7."""
    for node, cores in ((0, "0-3"), (1, "4-7"), (2, "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}/cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr(numa, "NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)))
    monkeypatch.setattr(numa, "memory_policy", lambda: numa.DEFAULT_POLICY)
    return tmp_path


@pytest.mark.usefixtures("two_nodes")
def test_each_rank_gets_the_allowed_cores_of_its_gpu_s_node() -> None:
    found = choose("auto", "spawn", "cuda", [gpu(0, 1), gpu(1, 0)], 2)
    assert found.bindings == (
        {"node": 1, "cores": [4, 5, 6]},
        {"node": 0, "cores": [0, 1, 2, 3]},
    )
    assert (found.memory, found.threads) == (True, 3)
    assert "4-6" in found.sentence() and "rank 0" in found.sentence()
    assert "rank 2" in found.sentence(2) and "rank 0" not in found.sentence(2)
    shared = choose("auto", "spawn", "cuda", [gpu(0, 1), gpu(1, 1)], 2)
    assert shared.threads == 1, "two ranks share three cores"
    half = choose("auto", "spawn", "cuda", [gpu(0, 1), gpu(1, None)], 2)
    assert half.bindings == ({"node": 1, "cores": [4, 5, 6]}, None)
    assert half.threads is None


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize(
    ("asked", "launcher", "device", "nodes"),
    [
        ("off", "spawn", "cuda", (0, 1)),
        ("auto", "torchrun", "cuda", (0, 1)),
        ("auto", "env", "cuda", (0, 1)),
        ("auto", "spawn", "cpu", ()),
        ("auto", "spawn", "cuda", (None, None)),
        ("auto", "spawn", "cuda", (2, 2)),  # has no cores
    ],
)
def test_otherwise_no_rank_is_bound(
    asked: str, launcher: str, device: str, nodes: tuple[int | None, ...]
) -> None:
    gpus = [gpu(i, node) for i, node in enumerate(nodes)]
    found = choose(asked, launcher, device, gpus, 2)
    assert (found.bindings, found.threads) == ((None, None), None)
    assert found.reason


def test_one_node_is_never_divided(two_nodes: Path) -> None:
    for node in (1, 2):
        (two_nodes / f"node{node}/cpulist").unlink()
    found = choose("auto", "spawn", "cuda", [gpu(0, 0), gpu(1, 0)], 2)
    assert found.bindings == (None, None)


@pytest.mark.usefixtures("two_nodes")
@each(
    ("cores", "bound"),
    [
        ({0, 1, 2, 3, 4}, False),  # one core for a rank, four for the other
        ({0, 1, 2, 4}, True),
        ({0, 1, 2, 3}, True),  # the rank of the other node is not bound
        (set(range(8)), True),
    ],
)
def test_a_node_with_few_of_the_allowed_cores_binds_no_rank(
    cores: set[int], bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    found = choose("auto", "spawn", "cuda", [gpu(0, 0), gpu(1, 1)], 2)
    assert any(found.bindings) == bound
    text = msg("host.numa.uneven", node=1, cores=len(cores & {4, 5, 6, 7}), allowed=len(cores))
    assert (found.reason == text) != bound
    other = choose("auto", "spawn", "cuda", [gpu(0, 0), gpu(1, 0)], 2)
    assert all(other.bindings), "no GPU is there"
    asked = choose(min(cores), "spawn", "cuda", [gpu(0, 0), gpu(1, 1)], 2)
    assert all(asked.bindings)


def test_one_node_of_many_has_its_share(two_nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in range(8):
        (two_nodes / f"node{node}").mkdir(exist_ok=True)
        (two_nodes / f"node{node}/cpulist").write_text(f"{4 * node}-{4 * node + 3}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(1, 32)))
    assert choose("auto", "spawn", "cuda", [gpu(0, 0)], 1).threads == 3


@pytest.mark.usefixtures("two_nodes")
def test_a_node_can_be_given() -> None:
    found = choose(0, "spawn", "cpu", [], 2)
    assert found.bindings == ({"node": 0, "cores": [0, 1, 2, 3]},) * 2
    assert found.threads == 2
    assert numa.problems(0, "spawn", "from c.py:1") == []
    for node in (2, 5):
        (problem,) = numa.problems(node, "spawn", "from c.py:1")
        assert (problem.code, problem.field) == ("numa.node", "numa")
        assert "(from c.py:1)" in problem.what
        assert problem.fixes == ["--numa=auto", "--numa=0"]
        assert numa.problems(node, "torchrun", "from c.py:1") == []
        assert choose(node, "spawn", "cpu", [], 2).bindings == (None, None)


@pytest.mark.usefixtures("two_nodes", "home")
def test_a_node_that_the_machine_lacks_is_reported_with_the_other_errors() -> None:
    assert {p.code for p in wrong("--numa=5", "--depth=0")} == {"field.value", "numa.node"}
    assert only(wrong("--numa=5")).fixes[1] == f"./{ENHANCED} --numa=0"
    with pytest.raises(UserError) as error:
        script_request.read(LAUNCH, ["2", "--numa=5", "--script=no.py"], {})
    assert {p.code for p in error.value.problems} == {"script.file", "numa.node"}


@pytest.mark.usefixtures("two_nodes", "home")
def test_a_node_of_other_machines_is_not_looked_for_here() -> None:
    words = ["2", "--numa=5", "--hosts=192.0.2.1"]
    assert ask(*words, script=LAUNCH).config.numa == 5
    assert request.read(LAUNCH, words[:2], {}, here=False).config.numa == 5


@pytest.mark.parametrize(
    ("text", "found"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("0-1", {0, 1})]
)
def test_lists_of_the_kernel(text: str, found: set[int]) -> None:
    assert numa.numbers(text) == found
    assert numa.spans(sorted(found)) == text


READ = (
    "import os; print(sorted(os.sched_getaffinity(0)));"
    "print(open('/proc/self/numa_maps').readline().split()[1])"
)


def run(binding: object, memory: bool) -> list[str]:
    argv, streams = [sys.executable, "-I", "-S", "-c", READ], spawn.Streams(True, first=False)
    env = os.environ | {process.TOKEN: process.new_token()}
    child = spawn._start(argv, env, 0, streams, (), binding, memory)
    with os.fdopen(child.outputs[2]) as output:
        lines = output.read().splitlines()
    os.close(child.pidfd)
    assert child.popen.wait() == 0
    return lines


def test_a_rank_is_bound_before_its_program_starts() -> None:
    own = sorted(os.sched_getaffinity(0))
    assert run(None, False) == [str(own), "default"]
    memory = numa.memory_policy() == numa.DEFAULT_POLICY
    cores, policy = run({"node": 0, "cores": own[-1:]}, memory)
    assert cores == str(own[-1:])
    assert policy == ("prefer:0" if memory else "default")
    assert sorted(os.sched_getaffinity(0)) == own, "the launcher is not"


def test_cores_are_bound_where_the_memory_policy_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numa, "prefer_memory", lambda node: False)
    one = sorted(os.sched_getaffinity(0))[-1:]
    text, cores, policy = run({"node": 0, "cores": one}, True)
    assert text == msg("launcher.numa.cores_only", node=0)
    assert (cores, policy) == (str(one), "default")


OWN_POLICY = """
import ctypes
from training.host import numa
INTERLEAVE, mask = 3, ctypes.c_ulong(1)
number = numa.SET_MEMPOLICY[numa.platform.machine()]
if numa._libc.syscall(number, INTERLEAVE, ctypes.byref(mask), ctypes.c_ulong(65)):
    print("refused")
else:
    print(numa.choose(0, "spawn", "cpu", [], 1, "-").memory)
    print(open("/proc/self/numa_maps").readline().split()[1])
"""


def test_a_memory_policy_of_the_user_is_kept() -> None:
    memory, *policy = python("-c", OWN_POLICY).stdout.split()
    if memory == "refused":
        pytest.skip("the kernel or container refuses memory policies")
    assert (memory, policy) == ("False", ["interleave:0"])


@pytest.mark.usefixtures("two_nodes")
@each("policy", [None, 3])
def test_memory_is_preferred_only_instead_of_the_default_policy(
    policy: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "memory_policy", lambda: policy)
    found = choose(0, "spawn", "cpu", [], 2)
    assert not found.memory and found.threads == 2


def test_a_core_that_was_taken_away_does_not_stop_the_rank() -> None:
    text, cores, _ = run({"node": 1, "cores": [1023]}, False)
    assert "NUMA" in text and cores == str(sorted(os.sched_getaffinity(0)))
