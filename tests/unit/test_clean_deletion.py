"""`./duet clean`: deletion itself, and what cannot or may not be deleted."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.unit.monitor_runs import Made
from tests.unit.runs_to_clean import a_finished_and_a_live_run, cleaned, everything, save, steps
from tests.unit.test_runs_table import ended
from training.cli.cleaning import deletion
from training.core import manifest, owner
from training.core.errors import Exit
from training.core.messages import msg
from training.core.rundir import RunDir


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return a_finished_and_a_live_run(tmp_path / "some runs")


def test_links_are_never_followed(folder: Path, tmp_path: Path) -> None:
    other = ended(Made(tmp_path / "elsewhere" / "kept")).run
    for step in (10, 20):
        save(other, step)
    (folder / "link").symlink_to(other.path)
    half = ended(Made(folder / "half")).run
    half.checkpoints.rmdir()
    half.checkpoints.symlink_to(other.checkpoints)
    inner = folder / "done" / "ranks" / "out"
    inner.symlink_to(other.path)
    before = everything(tmp_path / "elsewhere")
    assert cleaned(folder, "--keep=none", "--yes") == Exit.DONE
    assert cleaned(folder, "--what=runs", "--state=finished", "--yes") == Exit.DONE
    assert everything(tmp_path / "elsewhere") == before
    assert (folder / "link").is_symlink()


def test_what_an_interrupted_cleaning_left_is_removed(folder: Path) -> None:
    (folder / ".trash-old-77" / "checkpoints").mkdir(parents=True)
    assert cleaned(folder, "--keep=last", "--yes", "nothing_matches") == Exit.DONE
    assert not (folder / ".trash-old-77").exists()


def test_what_was_being_written_is_removed(folder: Path) -> None:
    for name in ("done", "live"):
        rest = RunDir(folder / name).checkpoints / f"{manifest.TEMPORARY}step_00000040"
        rest.mkdir()
        (rest / "state.pt").write_bytes(b"half")
    assert cleaned(folder, "--keep=last", "--yes") == Exit.DONE
    left = [path.parts[-3] for path in folder.glob(f"*/checkpoints/{manifest.TEMPORARY}*")]
    assert left == ["live"]


def test_two_cleanings_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = deletion.delete

    def second(*args: object) -> object:
        monkeypatch.setattr(deletion, "delete", real)
        assert cleaned(folder, "--keep=last", "--yes") == Exit.DONE
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(deletion, "delete", second)
    assert cleaned(folder, "--keep=last", "--yes") == Exit.DONE
    assert steps(folder) == [30]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to read-only folders")
def test_read_only_folders_are_deleted(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    locked = folder / "done" / "cache" / "locked"
    locked.mkdir(parents=True)
    (locked / "file").touch(mode=0o400)
    (locked / "link").symlink_to(outside)
    for path in (outside, locked, locked.parent):
        path.chmod(0o500)
    assert cleaned(folder, "--what=runs", "--yes", "done") == Exit.DONE
    assert sorted(path.name for path in folder.iterdir()) == ["live"]
    assert outside.stat().st_mode & 0o777 == 0o500


def test_runs_of_another_user_are_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also what their own cleaning has not completed."""
    foreign = (".trash-old-77", "done")
    (folder / foreign[0]).mkdir()
    ended(Made(folder / "mine", age_s=5000))
    monkeypatch.setattr(owner, "other", lambda path: "alice" if path.name in foreign else "")
    whose = msg("cli.clean.other_user", user="alice")
    for argv in (["done"], ["--older_than=1h"]):
        assert cleaned(folder, "--what=runs", *argv, "--json", "--yes") == Exit.DONE
        left = json.loads(capsys.readouterr().out)["left"]
        assert left == [{"run": name, "reason": whose} for name in foreign]
    assert steps(folder) == [10, 20, 30]
    assert [(folder / name).exists() for name in (foreign[0], "mine")] == [True, False]


def test_what_cannot_be_deleted_keeps_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As by root on a server that gives it no rights, or the files of another user in a run."""
    done = folder / "done"
    for path, mode in ((done, 0o775), (done / "ranks", 0o500), (done / "checkpoints", 0o555)):
        path.chmod(mode)
    before = everything(folder)

    def refused(path: Path) -> None:
        raise PermissionError(1, os.strerror(1))

    monkeypatch.setattr(shutil, "rmtree", refused)
    for argv in (["--what=runs", "done"], ["--keep=last"], ["--what=logs"]):
        assert cleaned(folder, *argv, "--yes", "--json") == Exit.RESOURCES
        assert everything(folder) == before, argv
    reason = json.loads(capsys.readouterr().out.splitlines()[-1])["left"][-1]["reason"]
    assert reason == os.strerror(1)
