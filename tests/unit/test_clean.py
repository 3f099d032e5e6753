"""`./duet clean`: rules, the dry run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.unit.monitor_runs import Made
from tests.unit.runs_to_clean import a_finished_and_a_live_run, cleaned, everything, save, steps
from tests.unit.test_runs_table import ended
from training.core import manifest
from training.core.errors import Exit
from training.core.messages import msg
from training.core.rundir import RunDir


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return a_finished_and_a_live_run(tmp_path / "some runs")


def test_nothing_is_deleted_without_yes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = everything(folder)
    assert cleaned(folder, "--keep=last", "--json") == Exit.DONE
    found = json.loads(capsys.readouterr().out)
    assert [Path(item["path"]).name for item in found["items"]] == [
        "step_00000010",
        "step_00000020",
    ]
    assert found["dry_run"]
    assert found["bytes"] == sum(item["bytes"] for item in found["items"]) > 0
    assert [left["run"] for left in found["left"]] == ["live"]
    assert cleaned(folder, "--what=runs,checkpoints,logs,traces", "--older_than=1s") == Exit.DONE
    assert cleaned(folder, "--keep=last", "--yes", "--dry-run") == Exit.DONE
    assert everything(folder) == before


def test_a_name_that_no_run_has_is_reported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    near = msg("cli.clean.near", name="dome", near="done")
    none = msg("cli.runs.none_of", count=2, folder=folder)
    for argv, warned, alone in (
        (["dome"], near, True),
        (["dome", "--yes"], near, True),
        (["d*", "dome"], near, False),
        (["xyz*"], msg("cli.clean.no_run", name="xyz*"), True),
    ):
        assert cleaned(folder, "--what=logs", *argv) == Exit.DONE
        printed = capsys.readouterr()
        assert (warned in printed.err, none in printed.out) == (True, alone), argv
    assert cleaned(folder, "--what=logs", "done") == Exit.DONE
    printed = capsys.readouterr()
    assert not printed.err and none not in printed.out


def test_rules_for_checkpoints(folder: Path) -> None:
    for rule, left in (("2", [20, 30]), ("checkpoints:last,best", [30]), ("none", [])):
        assert cleaned(folder, f"--keep={rule}", "--yes") == Exit.DONE, rule
        assert steps(folder) == left, rule
        assert steps(folder, "live") == [10, 20, 30]
    assert not list((folder / "done" / "checkpoints").iterdir())


def test_the_best_checkpoint_is_kept(folder: Path) -> None:
    assert cleaned(folder, "--keep=last,best", "--yes") == Exit.DONE
    assert steps(folder) == [10, 30]


def test_a_damaged_last_checkpoint_does_not_cost_the_intact_one(folder: Path) -> None:
    state = folder / "done" / "checkpoints" / manifest.folder_name(30) / "state.pt"
    content = bytearray(state.read_bytes())
    content[0] ^= 1  # same size: only the checksum shows it
    state.write_bytes(content)
    assert cleaned(folder, "--keep=last", "--yes") == Exit.RESOURCES
    assert steps(folder) == [20, 30]


def test_whole_runs_go_by_condition(folder: Path) -> None:
    (folder / "nothing").mkdir()
    os.utime(folder / "nothing", (0, 0))
    (folder / "pictures").mkdir()
    (folder / "pictures" / "cat.png").write_bytes(b"x")
    assert cleaned(folder, "--what=runs", "--older_than=30d", "--yes") == Exit.DONE
    assert (folder / "done").exists()
    assert cleaned(folder, "--what=runs", "--older_than=1h", "--yes") == Exit.DONE
    assert cleaned(folder, "--what=runs", "--yes", "n*", "p*", "l*") == Exit.DONE
    assert sorted(path.name for path in folder.iterdir()) == ["live", "pictures"]


def test_weights_that_a_run_starts_from_stay(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until its first checkpoint, while it may be running or queued."""
    source = RunDir(folder / "done").checkpoints / manifest.folder_name(20) / manifest.STATE
    begun = {"file": str(source)}
    tune = Made(folder / "tune", init_from=begun).supervisor(os.getpid())
    ended(Made(folder / "over", age_s=5000, init_from=begun))
    assert cleaned(folder, "--what=runs", "--yes", "done") == Exit.DONE
    assert steps(folder) == [10, 20, 30]
    assert msg("cli.clean.starts_from", name="tune") in capsys.readouterr().out
    assert cleaned(folder, "--keep=last", "--yes") == Exit.DONE
    assert steps(folder) == [20, 30]
    save(tune.run, 1)
    assert cleaned(folder, "--keep=last", "--yes") == Exit.DONE
    assert steps(folder) == [30]


def test_logs_and_traces(folder: Path) -> None:
    run = RunDir(folder / "done")
    run.profile.mkdir()
    run.trace(0).write_bytes(b"trace")
    run.rank_log(0).write_bytes(b"log")
    run.memory_snapshot(0).write_bytes(b"snapshot")
    assert cleaned(folder, "--what=traces", "--yes") == Exit.DONE
    assert (run.profile.exists(), run.memory_snapshot(0).exists()) == (False, False)
    assert run.rank_log(0).exists()
    assert cleaned(folder, "--what=logs", "--yes") == Exit.DONE
    assert not run.ranks.exists()
    assert steps(folder) == [10, 20, 30]
