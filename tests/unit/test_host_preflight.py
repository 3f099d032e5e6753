"""Checks of folders, disk and shared memory; the checks of GPUs and memory are in test_plan.py and test_host_gpus.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.conftest import clean_environment, python
from training.host import preflight
from training.host.preflight import ERROR, OK, WARNING, Check, folder
from training.rundir import RunDir, write_json

Usage = namedtuple("Usage", "total used free")
GIB = 1 << 30


def check(path: Path, needed: int = 1 << 20) -> Check:
    return folder("run", path, "out_dir", needed, "from --out_dir on the command line")


def test_a_folder_that_takes_files_or_will_be_made(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "new" / "deep"):
        found = check(path)
        assert (found.name, found.status) == ("run folder", OK)
        assert found.text.startswith(f"{path}: ")
    assert os.listdir(tmp_path) == [], "the check leaves nothing behind"


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        found = check(path)
        assert (found.status, found.fixes) == (ERROR, ["--out_dir=/another/folder"])
        assert found.text == f"run folder {path} (from --out_dir on the command line): {tmp_path}/file is not a folder"


def test_a_link_to_nowhere(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path / "link", tmp_path / "link" / "run"):
        assert check(path).status == ERROR


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(9 * GIB, 6 * GIB, 3 * GIB))
    assert check(tmp_path, 3 * GIB).status == OK
    found = check(tmp_path, 4 * GIB)
    assert found.status == ERROR
    assert found.text.endswith(": 3.0 GiB free, 4.0 GiB needed")


CODE = """
import sys
from pathlib import Path
from training.host.preflight import folder
found = folder("run", Path(sys.argv[1]), "out_dir", 4096, "default")
print(found.status, found.text)
"""


def test_a_read_only_disk(on_small_disk: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    done = on_small_disk("-c", CODE, f"{tmp_path}/disk/run", options="ro")
    assert done.stdout == f"error run folder {tmp_path}/disk/run (default) can not be written: Read-only file system\n", done.stderr


def test_a_full_disk(on_small_disk: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    filled = "head -c 1048576 /dev/zero >filler"
    done = on_small_disk("-c", CODE, f"{tmp_path}/disk/run", options="size=1m", before=filled)
    assert done.stdout == f"error run folder {tmp_path}/disk/run (default) can not be written: No space left on device\n", done.stderr


def test_shared_memory_only_matters_with_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert preflight.shared_memory(0, 2) is None
    monkeypatch.setattr(os.path, "isdir", lambda path: True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(GIB, 0, 256 << 20))
    assert preflight.shared_memory(2, 2).status == OK  # type: ignore[union-attr]
    tight = preflight.shared_memory(3, 2)
    assert tight is not None
    assert (tight.status, tight.fixes) == (WARNING, ["--num_workers=0"])
    assert tight.text.endswith(" free for 6 workers")
    monkeypatch.setattr(os.path, "isdir", lambda path: False)
    assert preflight.shared_memory(3, 2) is None


def test_the_report_is_a_line_a_check() -> None:
    records = [Check("GPUs", OK, "fine").record(), Check("run folder", ERROR, "no").record(), Check("port", WARNING, "hm").record()]
    assert preflight.table(records) == "  ok       GPUs        fine\n  error    run folder  no\n  warning  port        hm\n"


def test_the_report_as_a_program(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    write_json(run.preflight, {"checks": [Check("GPUs", OK, "2 visible").record()]})
    log = tmp_path / "x.log"
    done = python("-m", "training.host.preflight", str(run.path), DUET_LOG_FILE=str(log))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.endswith("resource check\n  ok       GPUs  2 visible\n")
    assert log.read_text() == done.stderr


def test_a_check_that_fails_is_a_problem_with_its_fixes() -> None:
    problem = Check("GPUs", ERROR, "none", ["do this"]).problem()
    assert (problem.what, problem.fixes) == ("none", ["do this"])
    assert json.loads(json.dumps(Check("a", OK, "b").record())) == {"name": "a", "status": "ok", "text": "b", "fixes": []}
    assert clean_environment()["PYTHONPATH"]
