"""The command of the communication test, without starting ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.unit.conftest import python
from training.cli import communication as command
from training.core.errors import Exit, UserError
from training.core.messages import msg

RUN = (str(ROOT / "lib/run_module.py"), "training.cli.communication")


def test_options() -> None:
    chosen = command.parse(["3"])
    assert (chosen.ranks, chosen.device, chosen.limit_s, chosen.help) == (3, "auto", 20.0, False)
    chosen = command.parse(["--device", "cpu", "2", "--limit=5"])
    assert (chosen.ranks, chosen.device, chosen.limit_s) == (2, "cpu", 5.0)
    assert command.parse(["-h"]).help and command.parse(["--help"]).help


@pytest.mark.parametrize(
    ("argv", "what", "fix"),
    [
        ([], "the number of ranks is missing", "./duet communication 2"),
        (["two"], "the number of ranks is 'two'", "./duet communication 2"),
        (["0"], "the number of ranks is '0'", "./duet communication 2"),
        (["2", "3"], "the number of ranks is '2 3'", "./duet communication 2"),
        (["2", "--device=gpu"], "--device is 'gpu'", "./duet communication 2 --device=auto"),
        (["2", "--limit=0"], "--limit is '0'", "./duet communication 2 --limit=20"),
        (["2", "--limit=soon"], "--limit is 'soon'", "./duet communication 2 --limit=20"),
        (
            ["2", "--devise=cpu"],
            "--devise is not a known flag",
            "./duet communication 2 --device=cpu",
        ),
        (["2", "--frequency"], "--frequency is not a known flag", "./duet communication --help"),
    ],
)
def test_invalid_options(argv: list[str], what: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        command.parse(argv)
    (problem,) = caught.value.problems
    assert (problem.what, problem.fixes, caught.value.code) == (what, [fix], Exit.CONFIG)


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(UserError) as caught:
        command.parse(["x", "--device=gpu", "--limit=0"])
    assert len(caught.value.problems) == 3


def test_help_works_without_torch() -> None:
    code = (
        "import sys; from training.cli import communication as m; m.main(['--help']); assert "
        "not {'torch', 'numpy'} & set(sys.modules)"
    )
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("--device=auto", "--limit=20", "Exit codes: 0 communication works"):
        assert part in done.stdout


def test_an_invalid_command_line_is_exit_2() -> None:
    done = python(*RUN, "none")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        "the number of ranks is 'none'" in done.stderr
        and "nothing was tested (exit 2)" in done.stderr
    )


def test_a_single_rank() -> None:
    done = python(*RUN, "1", "--device=cpu")
    assert (done.returncode, done.stdout) == (
        0,
        "  ok       communication  one rank: nothing to test\n",
    ), done.stderr


def test_missing_gpus_are_exit_3(nvidia: Callable[..., dict[str, Any]]) -> None:
    done = python(*RUN, "3", "--device=cuda", **nvidia(COUNT=2))
    assert (done.returncode, done.stdout) == (3, "")
    assert (
        "3 GPUs are needed, 2 visible: 2 GPUs on this machine" in done.stderr
        and "./duet communication 3 --device=cpu" in done.stderr
    )


def test_parts_of_gpus_are_exit_3(nvidia: Callable[..., dict[str, Any]]) -> None:
    parts = nvidia(MIG=1, MIG_GIB=10, CUDA_VISIBLE_DEVICES="MIG-00000000,MIG-00000001")
    done = python(*RUN, "2", **parts)
    assert (done.returncode, done.stdout) == (3, "")
    assert msg("plan.gpus.mig_ranks") in done.stderr
    assert "sudo nvidia-smi -i 1 -mig 0" in done.stderr and "--device=cpu" in done.stderr


def test_a_torch_for_the_cpu_is_exit_3(nvidia: Callable[..., dict[str, Any]]) -> None:
    done = python(*RUN, "2", "--device=cuda", **nvidia(COUNT=2, torch=None))
    assert done.returncode == 3
    assert "torch 2.99.0 is built for the CPU only" in done.stderr


def test_the_plan_of_two_gpus(nvidia: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    code = """
import json
from training.cli import communication as command
from training.host import p2p_cache
def show():
    plan = command.plan(command.parse(["2"]))
    print(json.dumps([plan["device"]["value"], len(plan["gpus"]), {v["name"]: v["value"] for v in plan["variables"]}]))
    return p2p_cache.key(map(p2p_cache.identity, plan["gpus"]), plan["driver"], plan["torch"])
key = show()
p2p_cache.remember(key, p2p_cache.verdict(key, p2p_cache.WITHOUT_P2P, gb_per_s=1, small_ms=1))
show()
"""
    done = python("-c", code, **nvidia(COUNT=3), XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    device, gpus, variables = json.loads(first)
    assert (device, gpus, variables["NCCL_SOCKET_IFNAME"]) == (
        "cuda",
        2,
        "=lo",
    ) and "NCCL_P2P_DISABLE" not in variables
    assert json.loads(second)[2] == variables, "the copies are tested, as after a repair"
