"""Run directory: stable file names and atomic writes."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conftest import clean_environment
from training.config.schema import Config
from training.core import checkpoint_folder, log, rundir, umask
from training.core.heartbeat import Heartbeat
from training.core.rundir import RunDir
from training.launcher.slurm import code_snapshot
from training.plan import writer
from training.trainer.metrics_writer import MetricsWriter


@pytest.mark.parametrize(
    ("mask", "file", "folder"),
    [(0o002, 0o664, 0o775), (0o022, 0o644, 0o755), (0o077, 0o600, 0o700)],
)
def test_permissions_follow_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: int, file: int, folder: int
) -> None:
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    monkeypatch.setattr(log, "_log", None)
    before = os.umask(mask)
    try:
        rundir.write_json(tmp_path / "a.json", {})
        made = Path(tempfile.mkdtemp(dir=tmp_path))
        umask.use(made)
        work = checkpoint_folder.new_work(tmp_path, 1)
        checkpoint_folder.publish(work, tmp_path / "step_00000001")
        # a colleague may continue the run
        rundir.append_json(tmp_path / "events.jsonl", {})
        Heartbeat(tmp_path / "rank0.bin", 0)
        log.open_log(tmp_path / "run.log")
        MetricsWriter(RunDir(tmp_path), Config(use_dummy_wandb=True, tensorboard=False))
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    for name in ("a.json", "events.jsonl", "rank0.bin", "run.log", "metrics.jsonl"):
        assert mode(tmp_path / name) == file, name
    assert mode(made) == mode(tmp_path / "step_00000001") == folder


def test_a_file_system_that_refuses_chmod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFS, exFAT and drvfs may, for files of this user too."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chmod", refused)
    for content in (b"one", b"another"):
        rundir.write_output(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content
    umask.use(tmp_path)
    made = RunDir(tmp_path / "run")
    made.create()
    rundir.write_json(made.plan, {})
    os.utime(made.plan, (1000, 1000))
    writer._keep_before(made)  # as each --resume
    assert made.plan_before.stat().st_mtime == 1000
    (tmp_path / "project").mkdir()
    (tmp_path / "project/train.py").touch()
    assert code_snapshot.take(tmp_path / "project", tmp_path / "copy").files == 1


def test_an_output_keeps_the_permissions_of_the_file_it_replaces(tmp_path: Path) -> None:
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    page.write_text("old")
    page.chmod(0o640)
    link.symlink_to(page)
    rundir.write_output(link, b"new")
    assert (page.read_bytes(), stat.S_IMODE(page.stat().st_mode)) == (b"new", 0o640)


def test_the_names_are_fixed(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a run")
    names = [*vars(run), *(name for name in dir(run) if isinstance(getattr(run, name), Path))]
    found = {
        name: str(getattr(run, name).relative_to(run.path)) for name in names if name != "path"
    }
    assert found == {
        "own": ".",
        "own_plan": "plan.json",
        "received": "a run",
        "plan": "plan.json",
        "plan_before": "plan.before.json",
        "data_before": "data.before.json",
        "preflight": "preflight.json",
        "argv": "launch.argv",
        "env": "launch.env",
        "data": "data.json",
        "metrics": "metrics.jsonl",
        "events": "events.jsonl",
        "summary": "summary.json",
        "report": "report.html",
        "failure": "failure.json",
        "supervisor": "supervisor.json",
        "machines": "machines.json",
        "heartbeats": "heartbeat",
        "ranks": "ranks",
        "hangs": "hangs",
        "watch_error": "watch_error.txt",
        "checkpoints": "checkpoints",
        "samples": "samples",
        "profile": "profile",
        "tensorboard": "tb_logger",
        "tokenizer": "tokenizer",
        "wandb": "wandb",
        "replica": "replica.json",
        "replaced": "replaced",
        "archived": "archive.json",
        "wandb_id": "wandb.json",
    }
    assert run.heartbeat(3) == run.path / "heartbeat/rank3.bin"
    assert run.rank_log(3) == run.path / "ranks/rank3.log"
    assert run.rank_error(3) == run.path / "ranks/rank3.error.json"
    assert run.name == "a run"


def test_create_makes_the_folders_and_reading_does_not(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "deep" / "run")
    assert rundir.read_json(run.plan) is None
    assert list(rundir.read_records(run.metrics)) == []
    assert not run.path.parent.exists()
    run.create()
    run.create()
    assert sorted(p.name for p in run.path.iterdir()) == ["checkpoints", "heartbeat", "ranks"]


def test_json_round_trip(tmp_path: Path) -> None:
    value = {
        "loss": 0.1 + 0.2,
        "name": 'a "quote"\n训练',
        "none": None,
        "list": [1, [2]],
        "big": 1 << 62,
    }
    rundir.write_json(tmp_path / "x.json", value)
    assert rundir.read_json(tmp_path / "x.json") == value
    assert (tmp_path / "x.json").read_bytes().endswith(b"\n")
    assert (tmp_path / "x.json").stat().st_mode & 0o777 == 0o644


def test_each_node_has_its_own_folder(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run", 2)
    run.create()
    own = {
        path.relative_to(run.path).parts[0]
        for path in (run.own_plan, run.argv, run.env, run.preflight, run.supervisor, run.failure)
    }
    assert own == {"node2"} and run.own.is_dir()
    common = {run.plan, run.metrics, run.events, run.checkpoints, run.heartbeat(3), run.rank_log(3)}
    assert not any("node2" in str(path) for path in common)


def test_a_name_with_invalid_utf8_is_written(tmp_path: Path) -> None:
    # A data file from an old disk: its name reaches plan.json, data.json and index.json as a lone
    # surrogate.
    name = os.fsdecode(b"caf\xe9.txt")
    rundir.write_json(tmp_path / "x.json", {"data": name})
    assert rundir.read_json(tmp_path / "x.json") == {"data": name}
    rundir.append_json(tmp_path / "x.jsonl", {"data": name})
    assert list(rundir.read_records(tmp_path / "x.jsonl")) == [{"data": name}]


@pytest.mark.parametrize("failing", ["fsync", "replace", "write"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    rundir.write_json(path, {"old": True})

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    if failing == "write":
        real = os.fdopen

        def opened(*args: object, **kwargs: object) -> object:
            file = real(*args, **kwargs)  # type: ignore[call-overload]
            real_close = file.close
            return type(
                "Full",
                (),
                {"__enter__": lambda s: s, "__exit__": lambda s, *a: real_close(), "write": full},
            )()

        monkeypatch.setattr(os, "fdopen", opened)
    else:
        monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match="No space"):
        rundir.write_json(path, {"new": True})
    monkeypatch.undo()
    assert rundir.read_json(path) == {"old": True}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_an_output_that_a_user_names_may_be_a_link_or_a_pipe(tmp_path: Path) -> None:
    target, link, fifo = tmp_path / "target", tmp_path / "link", tmp_path / "fifo"
    link.symlink_to(target)
    for content in (b"first", b"second"):
        rundir.write_output(link, content)
        assert link.is_symlink() and target.read_bytes() == content
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    rundir.write_output(fifo, b"page")
    assert os.read(reader, 10) == b"page" and fifo.is_fifo()
    os.close(reader)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fifo", "link", "target"]


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    rundir.write_json(path, {"old": True})
    code = (
        "import os, signal, sys; from pathlib import Path; from training.core import rundir;"
        "os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL);"
        "rundir.write_json(Path(sys.argv[1]), {'new': True})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], env=clean_environment(), check=False
    )
    assert done.returncode == -9
    assert rundir.read_json(path) == {"old": True}


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"[1, 2]", b"\xff\xfe", b'"text"'])
def test_incomplete_objects_are_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    assert rundir.read_json(tmp_path / "x.json") is None


def test_several_processes_append_whole_records(tmp_path: Path) -> None:
    run, each = RunDir(tmp_path), 200
    code = (
        "import sys; from training.core.rundir import RunDir; run = RunDir(sys.argv[1]);"
        f"[run.event('tick', who=int(sys.argv[2]), n=n, text='x' * 500) for n in range({each})]"
    )
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(w)], env=clean_environment()
        )
        for w in range(3)
    ]
    assert [w.wait(60) for w in writers] == [0, 0, 0]
    lines = run.events.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == 3 * each
    for who in range(3):
        assert [r["n"] for r in records if r["who"] == who] == list(range(each))
    assert all(r["event"] == "tick" and r["time"] > 0 for r in records)


def test_incomplete_and_foreign_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n[1]\n\n{"step": \xff}\n{"step": 2}\n{"st')
    assert list(rundir.read_records(path)) == [{"step": 1}, {"step": 2}]


def test_a_record_after_an_incomplete_line_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": 1}\n{"ev')
    rundir.append_json(path, {"event": 2})
    rundir.append_json(path, {"event": 3})
    assert [record["event"] for record in rundir.read_records(path)] == [1, 2, 3]


def test_a_result_of_a_clock_that_was_set_back_is_kept(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    plan: Any = {"created": time.time() + 3600, "launch": "new"}
    rundir.write_json(run.summary, {"launch": "new"})
    rundir.write_json(run.failure, {"launch": "old"})
    run.forget_before(plan, run.summary)
    assert (run.summary.exists(), run.failure.exists()) == (True, False)
