"""Every launch mode with real processes: the mode is detected and logged, ranks are never started
twice, leftover variables are ignored."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import TINY, Launched
from tests.e2e.hooks import at_import
from tests.e2e.two_machines import seeing
from training.core.rundir import RunDir, read_json, read_records
from training.launcher.local_ranks import free_port

Launch = Callable[..., Launched]
CONFIG = "configs/dual_gpu/quickstart.py"
SCRIPT = ("./launch_train.sh", "2", CONFIG)
ENTRY = (sys.executable, "-u", "train.py", CONFIG)
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run"),
    *("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"),
)


def injected(rank: int, size: int, port: int, *, local: bool = True) -> dict[str, str]:
    """Environment that a platform sets for each rank, or for each node."""
    found = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return found | ({"LOCAL_RANK": str(rank)} if local else {})


def first_line(run: Launched) -> str:
    """The first line of the launcher: the mode and its reason; of a local run in its log only."""
    shown = run.output
    if " mode " not in shown:
        shown = Path((read_json(run.run.plan) or {})["log_file"]).read_text()
    line = next(line for line in shown.splitlines() if line.startswith("[INFO]"))
    assert " mode " in line, line
    return line.partition(" mode ")[2]


@pytest.mark.soak
def test_plain_and_leftovers(launch: Launch, once: Launch) -> None:
    plain = once(*SCRIPT)
    assert first_line(plain) == "local: no launcher has started ranks"
    left = {
        "WORLD_SIZE": "7",
        "PET_NNODES": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_PORT": "1",
    }
    run = launch(*SCRIPT, env=left).ok()
    assert (
        "ignored, since no launcher has started ranks: MASTER_PORT, PET_NNODES, "
        "TORCHELASTIC_USE_AGENT_STORE, WORLD_SIZE" in run.output
    )
    assert run.losses == plain.losses
    alone = launch(*ENTRY, env=left, total_batch_size=128).ok()
    text = (read_json(alone.run.plan) or {})["text"]
    assert "1 rank by env: one rank: plain python, no process group" in text
    assert "ignored, since no launcher has started ranks" in alone.output


@pytest.mark.slow
def test_a_python_that_leaves_out_the_folder_of_a_script(launch: Launch) -> None:
    env = {"PYTHONSAFEPATH": "1", "PYTHONPATH": "/nowhere"}
    launch("./launch_train.sh", "1", CONFIG, env=env, total_batch_size=128).ok()


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(SCRIPT, id="script", marks=pytest.mark.slow),
        pytest.param(ENTRY, id="entrypoint", marks=pytest.mark.soak),
    ],
)
def test_a_platform_that_injects_ranks(launch: Launch, command: tuple[str, ...]) -> None:
    port = free_port("127.0.0.1")
    ranks = [launch(*command, name="platform", env=injected(rank, 2, port)) for rank in range(2)]
    for rank in ranks:
        rank.ok()
    assert (
        first_line(ranks[0])
        == "rank 0 of 2: a platform has started the ranks (RANK, LOCAL_RANK, WORLD_SIZE and "
        "MASTER_ADDR are set)"
    )
    assert "mode" not in ranks[1].output, "rank 0 alone speaks"
    plan = read_json(ranks[0].run.plan) or {}
    assert (plan["ranks"], plan["launcher"]["value"], plan["place"]["source"]) == (
        2,
        "env",
        "platform",
    )
    assert len(list(ranks[0].run.path.parent.iterdir())) == 1, "one run directory"
    assert not ranks[0].pids, "no ranks were started"


@pytest.mark.slow
def test_each_machine_of_a_platform_prepares_the_text_on_its_own_disk(
    launch: Launch, tmp_path: Path
) -> None:
    disk, other = tmp_path / "experiments", tmp_path / "disk1"
    disk.mkdir()
    other.mkdir()
    there = seeing(disk, other)
    env = injected(0, 2, free_port("127.0.0.1")) | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    first, second = (
        launch(*before, *ENTRY, name="platform", env=env | {"RANK": str(rank)})
        for rank, before in enumerate([(), there])
    )
    first.ok()
    second.ok()
    made = RunDir(other / "platform")
    assert (read_json(made.plan) or {})["shared"] is False and made.data.exists()
    assert "shared" not in (read_json(first.run.plan) or {})
    assert not list(first.run.path.glob(".*")), "the file that ranks on the same disk see"


def test_an_error_under_a_platform_is_reported_once(launch: Launch) -> None:
    port = free_port("127.0.0.1")
    ranks = [launch(*SCRIPT, env=injected(rank, 2, port), depht=3) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [2, 2]
    assert "--depht is not a known flag" in ranks[0].output and ranks[1].output == ""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param((*SCRIPT[:1], "1", *SCRIPT[2:]), id="script", marks=pytest.mark.soak),
        pytest.param(ENTRY, id="entrypoint", marks=pytest.mark.soak),
    ],
)
def test_a_platform_that_injects_nodes(
    launch: Launch, command: tuple[str, ...], tmp_path: Path
) -> None:
    """Two nodes with separate disks."""
    port = free_port("127.0.0.1")
    nodes = [
        launch(
            *command,
            name="nodes",
            env=injected(node, 2, port, local=False),
            out_dir=tmp_path / f"disk{node}",
            log_dir=tmp_path / f"logs{node}",
        )
        for node in range(2)
    ]
    for node in nodes:
        node.ok()
    assert first_line(nodes[0]).startswith("node 0 of 2, the first is 127.0.0.1:")
    assert first_line(nodes[1]).startswith("node 1 of 2, the first is 127.0.0.1:")
    assert (
        "node 1 has joined" in nodes[0].output
        and "the ranks of this machine have ended" in nodes[1].output
    )
    first, second = (RunDir(tmp_path / f"disk{node}/nodes", node or None) for node in range(2))
    assert (read_json(first.plan) or {})["launch"] == (read_json(second.plan) or {})["launch"]
    assert (read_json(second.own_plan) or {})["place"]["node_rank"] == 1
    assert [r["rank"] for r in (read_json(second.supervisor) or {})["ranks"]] == [1]
    assert first.summary.exists() and not second.summary.exists()


@pytest.mark.soak
def test_under_torchrun(launch: Launch) -> None:
    by_entry = launch(*TORCHRUN, "train.py", f"--config={CONFIG}").ok()
    assert (
        first_line(by_entry)
        == "rank 0 of 2: torchrun or Duet has started the ranks (TORCHELASTIC_RUN_ID is set)"
    )
    by_script = launch(*TORCHRUN, "--no-python", *SCRIPT).ok()
    assert first_line(by_script) == first_line(by_entry) and by_script.losses == by_entry.losses


@pytest.mark.slow
def test_a_restart_by_torchrun_resumes_the_run(launch: Launch, once: Launch) -> None:
    first = """os.environ.get("RANK") == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" """
    fault = """
        import torch.nn.functional as F
        original, calls = F.cross_entropy, [0]
        def planted(*args, **kwargs):
            calls[0] += 1
            if calls[0] == 8:
                raise ValueError("planted")
            return original(*args, **kwargs)
        F.cross_entropy = planted
    """
    run = launch(
        *(*TORCHRUN, "--max-restarts=1", "train.py", f"--config={CONFIG}"),
        name="restarted",
        hook=at_import("training.tasks.gpt.model", fault, first),
        save_every=4,
    ).ok()
    assert run.losses == once(*SCRIPT).losses
    assert [r["step"] for r in read_records(run.run.events) if r["event"] == "resume"] == [4]
    assert len(list(run.run.path.parent.iterdir())) == 1
    found = read_json(run.run.plan) or {}
    assert len(found["agents"]) == 1 and found["resume"]


@pytest.mark.slow
def test_launcher_overrides_what_is_injected(launch: Launch) -> None:
    run = launch(*SCRIPT, env=injected(1, 4, 1), launcher="spawn").ok()
    assert first_line(run) == "local: as asked (--launcher=spawn)" and len(run.pids) == 2


@pytest.mark.slow
def test_a_launcher_inside_a_rank_becomes_the_rank(
    launch: Launch, project: Path, tmp_path: Path
) -> None:
    words = [
        "./launch_train.sh",
        "2",
        CONFIG,
        *(
            f"--{k}={v}"
            for k, v in (TINY | {"out_dir": tmp_path / "inner", "log_dir": tmp_path}).items()
        ),
    ]
    inner = tmp_path / "inner.py"
    inner.write_text(
        f"import subprocess, sys\nsys.exit(subprocess.call({words!r}, cwd={str(project)!r}))\n"
    )
    launch("./launch_train.sh", "2", "--script", str(inner), tiny=False).ok()
    (plan,) = (tmp_path / "inner").glob("*/plan.json")
    assert (read_json(plan) or {})["place"]["source"] == "torchrun", "two ranks in all, not four"


def without_libuv(built: str) -> str:
    """Simulates a torch built without libuv: its store raises the same error."""
    return f"""
import importlib.machinery, sys
class Patch:
    def find_spec(self, name, path=None, target=None):
        if not name.startswith("torch.distributed"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec and spec.loader:
            real = spec.loader.exec_module
            def exec_module(module):
                real(module)
                if hasattr(module, "TCPStore") and not hasattr(module.TCPStore, "patched"):
                    original = module.TCPStore
                    class Store(original):
                        patched = True
                        def __init__(self, *args, use_libuv=True, **more):
                            if use_libuv:
                                raise RuntimeError("use_libuv was requested but PyTorch was {built} without libuv support")
                            super().__init__(*args, use_libuv=False, **more)
                    module.TCPStore = Store
            spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Patch())
"""


@pytest.mark.soak
def test_a_torch_without_libuv_trains(launch: Launch, once: Launch) -> None:
    hook = without_libuv("build")
    fails = launch(*TORCHRUN, "train.py", f"--config={CONFIG}", hook=hook)
    assert fails.wait() != 0 and "without libuv support" in fails.output, "the simulation works"
    plain = once(*SCRIPT)
    assert launch(*SCRIPT, hook=hook).ok().losses == plain.losses
    by_torchrun = launch(*SCRIPT, hook=hook, launcher="torchrun").ok()
    assert (
        "built without libuv: restarting with USE_LIBUV=0, without torchrun" in by_torchrun.output
        and by_torchrun.losses == plain.losses
    )
    port = free_port("127.0.0.1")
    ranks = [
        launch(*ENTRY, name="platform", hook=hook, env=injected(rank, 2, port)) for rank in range(2)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "problem"),
    [(0, "rank 1, 2, 3 of 4 did not connect to {at}"), (1, "rank 0 did not answer at {at}")],
)
def test_missing_ranks_of_a_platform_are_named(launch: Launch, rank: int, problem: str) -> None:
    port = free_port("127.0.0.1")
    env = injected(rank, 4, port)
    run = launch(*ENTRY, env=env, total_batch_size=512, rendezvous_timeout=1)
    assert run.wait() == 3
    assert problem.format(at=f"127.0.0.1:{port}") in run.output
    assert "Traceback" not in run.output and not run.run.path.exists()


@pytest.mark.slow
def test_an_address_of_a_platform_that_does_not_resolve(launch: Launch) -> None:
    env = injected(1, 2, 29500) | {"MASTER_ADDR": "no-such-host.invalid"}
    run = launch(*ENTRY, env=env, rendezvous_timeout=1)
    assert run.wait() == 3
    assert "MASTER_ADDR=no-such-host.invalid" in run.output and "Traceback" not in run.output
