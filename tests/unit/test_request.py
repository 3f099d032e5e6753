"""Launch requests that are accepted, and their values."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.conftest import (
    ENHANCED,
    LAUNCH,
    ROOT,
    SIMPLE,
    TRAIN,
    ask,
)
from training.core.errors import UserError
from training.plan import request

CONFIGS = ROOT / "configs/dual_gpu"


@pytest.mark.parametrize("name", ["conservative", "balanced", "aggressive", "quickstart"])
@pytest.mark.parametrize("script", [SIMPLE, ENHANCED])
def test_the_ready_configs_pass_on_two_ranks(name: str, script: str, home: Path) -> None:
    found = ask(str(CONFIGS / f"{name}.py"), script=script)
    assert (found.ranks, found.local_ranks, found.dry_run, found.resume_from) == (2, 2, False, None)
    assert found.config_file == CONFIGS / f"{name}.py"
    assert found.origins["depth"].startswith("from ") and f"{name}.py:" in found.origins["depth"]
    assert (found.experiments, found.logs) == (home / "experiments", home / "logs")
    assert found.source.name == "stdlib"
    assert not list(home.iterdir()), "looking changes nothing"


def test_both_dual_gpu_scripts_read_the_same_from_the_same_input(home: Path) -> None:
    args = [f"--config={CONFIGS / 'balanced.py'}", "--seed=7"]
    simple, enhanced = ask(*args, script=SIMPLE), ask(*args, script=ENHANCED)
    assert (simple.config, simple.origins, simple.ranks) == (
        enhanced.config,
        enhanced.origins,
        enhanced.ranks,
    )
    assert ask(args[0].partition("=")[2], "--seed=7").config == enhanced.config


def test_the_enhanced_script_needs_no_config(home: Path) -> None:
    found = ask("--total_batch_size=49152", "--dry-run")
    assert (found.config_file, found.dry_run, found.config.total_batch_size) == (None, True, 49152)


def test_the_documented_example_command(home: Path) -> None:
    # 16 × 1536 × 2 is all of 49152.
    found = ask(
        "--device_batch_size=16",
        "--total_batch_size=49152",
        "--num_iterations=50",
        "--eval_every=25",
    )
    assert (
        found.config.device_batch_size,
        found.config.num_iterations,
        found.config.eval_every,
    ) == (16, 50, 25)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 1024])
def test_any_number_of_processes(n: int, home: Path) -> None:
    assert ask(str(n), f"--total_batch_size={8 * 1536 * n}", script=LAUNCH).ranks == n


def test_ranks_of_another_launcher(home: Path) -> None:
    environ = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }
    found = request.read(TRAIN, ["--total_batch_size=49152"], environ)
    assert (found.ranks, found.local_ranks, found.place.rank) == (4, 2, 3)
    assert request.read(TRAIN, [], {}).local_ranks == 1
    told = request.read(LAUNCH, ["3", "--total_batch_size=49152"], environ)
    assert told.ranks == 4 and told.notes == [
        "3 processes were requested, but 4 ranks are already running"
    ]
    for typed in ("2", "4"):
        assert request.read(LAUNCH, [typed, "--total_batch_size=49152"], environ).notes == []


def test_local_ranks_without_a_local_world_size(home: Path) -> None:
    environ = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1",
    }
    assert [
        request.read(TRAIN, ["--total_batch_size=49152"], environ, gpus=n).local_ranks
        for n in (0, 2, 8)
    ] == [2, 2, 4]


def test_a_node_of_several_starts_its_own_share(home: Path) -> None:
    by_flags = request.read(
        LAUNCH,
        ["2", "--nnodes=2", "--node_rank=1", "--master_addr=h", "--total_batch_size=49152"],
        {},
    )
    assert (by_flags.ranks, by_flags.local_ranks) == (4, 2)
    injected = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}
    assert request.read(TRAIN, ["--total_batch_size=49152"], injected, gpus=2).local_ranks == 2
    assert request.read(TRAIN, ["--total_batch_size=24576"], injected, gpus=0).ranks == 2


def test_a_launcher_in_a_rank_is_refused(home: Path) -> None:
    environ = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "DUET_RUN_DIR": "/runs/outer",
    }
    with pytest.raises(UserError, match="this process is rank 0 of the run /runs/outer"):
        request.read(LAUNCH, ["2"], environ)
    assert (
        request.read(
            LAUNCH, ["2", "--launcher=spawn", "--total_batch_size=24576"], environ
        ).place.kind
        == "local"
    )


def test_an_error_of_all_ranks_is_reported_once_by_each_machine(home: Path) -> None:
    environ = {"WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}
    for rank, local, silent in (("0", "0", False), ("1", "1", True), ("2", "0", False)):
        with pytest.raises(UserError) as caught:
            request.read(TRAIN, ["--depht=3"], environ | {"RANK": rank, "LOCAL_RANK": local})
        assert caught.value.said_by_another is silent


def test_default_folders_are_in_the_project_named_ones_in_the_current_directory(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    found = ask("--log_dir=logs")
    assert (found.experiments, found.logs) == (home / "experiments", elsewhere / "logs")
    monkeypatch.setenv("HOME", str(tmp_path / "alice"))
    assert ask("--out_dir=~/runs").experiments == tmp_path / "alice/runs"
    assert ask(f"--out_dir={tmp_path}/x").experiments == tmp_path / "x"
