"""`./duet clean`: rules, the dry run, what is never touched."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import time
from pathlib import Path

import pytest

from tests.unit.monitor_runs import Made, old
from tests.unit.test_runs_table import ended
from training.cli import clean
from training.cli.cleaning import deletion, selection
from training.core import manifest, owner, rundir, standing
from training.core.errors import Exit
from training.core.heartbeat import Heartbeat
from training.core.messages import msg
from training.core.rundir import RunDir
from training.core.standing import ELSEWHERE_S
from training.launcher.slurm import controller
from training.monitor.runs import facts


def save(run: RunDir, step: int) -> Path:
    """A small checkpoint with its checksums."""
    folder = run.checkpoints / manifest.folder_name(step)
    folder.mkdir(parents=True)
    content = f"weights of step {step}".encode()
    (folder / "state.pt").write_bytes(content)
    facts = dict.fromkeys(manifest.KEYS[2:-3], None)
    own = {"step": step, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.write(folder, {**facts, **own})  # type: ignore[typeddict-item]
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three checkpoints in a finished run (the best evaluation is of the first one) and in a
    running one."""
    place = tmp_path / "some runs"
    done = ended(Made(place / "done", age_s=5000))
    live = Made(place / "live").steps(5).supervisor(os.getpid())
    for step, bpb in ((10, 1.0), (20, 2.0), (30, 1.5)):
        for run in (done.run, live.run):
            save(run, step)
            run.event("eval", step=step, val_bpb=bpb)
    return place


@pytest.fixture(autouse=True)
def _unknown_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "_away", {})
    monkeypatch.setattr(controller, "_local", [])


def steps(folder: Path, name: str = "done") -> list[int]:
    found = manifest.all_in(RunDir(folder / name).checkpoints)
    return [int(path.name.removeprefix("step_")) for path in found]


def cleaned(folder: Path, *argv: str) -> int:
    return clean.main([f"--dir={folder}", *argv])


def everything(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


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


def test_a_run_that_starts_after_the_listing_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = deletion.delete

    def starts(*args: object) -> object:
        run = RunDir(folder / "done")
        plan = rundir.read_json(run.plan) or {}
        run.summary.unlink()
        record = {"pid": os.getpid(), "started": plan["created"] + 1, "ranks": []}
        rundir.write_json(run.supervisor, record)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(deletion, "delete", starts)
    assert cleaned(folder, "--what=runs", "--state=finished", "--yes") == Exit.RESOURCES
    assert steps(folder) == [10, 20, 30]


def test_what_an_interrupted_cleaning_left_is_removed(folder: Path) -> None:
    (folder / ".trash-old-77" / "checkpoints").mkdir(parents=True)
    assert cleaned(folder, "--keep=last", "--yes", "nothing_matches") == Exit.DONE
    assert not (folder / ".trash-old-77").exists()


def test_a_directory_without_a_plan_may_be_a_start(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / name / "heartbeat").mkdir(parents=True)
        (folder / f"{name}-empty").mkdir()
    old = time.time() - 2 * standing.STARTED_WITHIN_S
    for path in folder.glob("b*"):
        os.utime(path, (old, old))
    assert cleaned(folder, "--what=runs", "--state=damaged,empty", "--yes") == Exit.DONE
    assert sorted(path.name for path in folder.iterdir()) == ["a", "a-empty", "done", "live"]


def test_a_run_without_a_supervisor_may_be_on_another_machine(folder: Path) -> None:
    """Ranks of torchrun on a shared disk: their PIDs mean nothing here."""
    there = Made(folder / "there", age_s=9000).steps(5).run
    Heartbeat(there.heartbeat(0), 0, pid=1 << 30).beat("forward")
    for step in (1, 2):
        save(there, step)
    here = Made(folder / "here", age_s=9000).steps(5).supervisor(1 << 30)
    facts = rundir.read_json(here.run.supervisor) or {}
    rundir.write_json(here.run.supervisor, {**facts, "host": socket.gethostname()})
    quiet_for(here, selection.HIDDEN_S)
    assert cleaned(folder, "--what=runs", "--state=died", "--yes") == Exit.DONE
    assert sorted(path.name for path in folder.iterdir()) == ["done", "live", "there"]
    assert cleaned(folder, "--keep=none", "--yes", "there") == Exit.DONE
    assert steps(folder, "there") == [1, 2]


def quiet_for(made: Made, seconds: float) -> None:
    """As if the run had written nothing for this time."""
    for file in made.run.path.rglob("*"):
        old(file, seconds)


def test_a_run_whose_processes_may_be_hidden_is_left_alone(folder: Path) -> None:
    """By a PID namespace, which early runs have not recorded, or by hidepid of /proc."""
    made = Made(folder / "hidden", age_s=9000).steps(5).supervisor(1 << 30)
    known = (rundir.read_json(made.run.supervisor) or {}) | {"host": socket.gethostname()}
    there = {"pid_namespace": "pid:[1]"}
    for more, seconds, gone in (
        ({}, 0.0, False),
        (there, selection.HIDDEN_S, False),
        (there, ELSEWHERE_S, True),
    ):
        rundir.write_json(made.run.supervisor, known | more)
        quiet_for(made, seconds)
        reason = selection.untouchable(facts.read(made.run.path))
        assert (not reason) == gone, (more, seconds)


@pytest.mark.parametrize(
    ("queued", "answer", "gone"),
    [
        ("submitted", "JobState=PENDING", False),
        ("requeue", "JobState=REQUEUE_HOLD", False),
        ("submitted", "JobState=CANCELLED", True),
        ("submitted", "", False),
        ("submitted a day ago", "", True),
        ("before the plan", "JobState=RUNNING", True),
        ("by SLURM", "JobState=PENDING", False),
        ("by SLURM", "", True),
        ("submitted to west", "JobState=PENDING", False),
        ("by SLURM on west", "JobState=PENDING", False),
        ("by SLURM on home", "JobState=PENDING", False),
    ],
)
def test_a_run_whose_job_waits_in_the_queue_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, queued: str, answer: str, gone: bool
) -> None:
    made = Made(folder / "waits", age_s=2 * ELSEWHERE_S)
    failure = {"kind": rundir.ASKED, "cause": "preempted", "time": made.at + 9}
    rundir.write_json(made.run.failure, failure)
    since = {"before the plan": -1.0, "submitted a day ago": ELSEWHERE_S - 9}
    at = made.at + since.get(queued, 2 * ELSEWHERE_S - 60)
    where, west = {"job": "4711"}, "west" in queued
    if queued.startswith("by SLURM"):
        on = {"cluster": queued.rpartition(" ")[2]} if " on " in queued else {}
        rundir.write_json(made.run.path / "code.json", where | on)
    else:
        on = {"cluster": "west"} if west else {}
        kind = "requeue" if queued == "requeue" else "submitted"
        rundir.append_json(made.run.events, {"event": kind, "time": at} | where | on)
    asked = "-M west show job -o 4711" if west else "show job -o 4711"
    scontrol(
        folder,
        monkeypatch,
        f'[ "$*" = "{asked}" ] && echo "{answer}"\n[ "$2" = config ] && echo "ClusterName = home"',
    )
    assert facts.read(made.run.path).state == "stopped"
    assert cleaned(folder, "--what=runs", "--yes", "waits") == Exit.DONE
    assert made.run.path.exists() != gone


def scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    program = folder.parent / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{lines}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def test_a_slurmctld_that_is_away_is_asked_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer may take a minute."""
    for name in ("one", "two"):
        made = Made(folder / name, age_s=2 * ELSEWHERE_S)
        failure = {"kind": rundir.ASKED, "cause": "preempted", "time": made.at + 9}
        rundir.write_json(made.run.failure, failure)
        event = {"event": "submitted", "time": time.time() - 60, "job": "4711"}
        rundir.append_json(made.run.events, event)
    calls = folder.parent / "calls"
    scontrol(folder, monkeypatch, f"echo >>'{calls}'; echo 'Unable to contact slurm' >&2; exit 1")
    assert cleaned(folder, "--what=runs", "--yes", "one", "two") == Exit.DONE
    assert (folder / "one").exists() and (folder / "two").exists()
    assert calls.read_text() == "\n"


def test_a_start_while_the_weights_are_read_keeps_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real = RunDir(folder / "done"), selection.is_intact

    def starts(path: Path) -> bool:
        run.summary.unlink(missing_ok=True)
        created = (rundir.read_json(run.plan) or {})["created"]
        rundir.write_json(run.supervisor, {"pid": os.getpid(), "started": created + 1, "ranks": []})
        return real(path)

    monkeypatch.setattr(selection, "is_intact", starts)
    assert cleaned(folder, "--keep=last", "--yes") == Exit.RESOURCES
    assert steps(folder) == [10, 20, 30]


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
    before = everything(folder)

    def refused(path: Path) -> None:
        raise PermissionError(1, os.strerror(1))

    monkeypatch.setattr(shutil, "rmtree", refused)
    for argv in (["--what=runs", "done"], ["--keep=last"], ["--what=logs"]):
        assert cleaned(folder, *argv, "--yes", "--json") == Exit.RESOURCES
        assert everything(folder) == before, argv
    reason = json.loads(capsys.readouterr().out.splitlines()[-1])["left"][-1]["reason"]
    assert reason == os.strerror(1)
