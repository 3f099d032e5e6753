"""`./duet archive` and the commands that read its files."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from tests.unit.monitor_runs import Made
from tests.unit.runs_to_clean import save
from tests.unit.test_runs_table import ended
from training.cli import archive as command
from training.cli import diagnose, report, runs
from training.core import archive, find_run, rundir, units
from training.core.errors import Exit, UserError
from training.core.messages import msg
from training.core.project import ROOT
from training.core.rundir import RunDir
from training.diagnose import result
from training.monitor import options, state
from training.monitor.runs import facts
from training.tasks import weights


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "duet" / "archives"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = ended(Made(tmp_path / "some runs" / "a run", age_s=900).beats())
    for step in (10, 20):
        save(made.run, step)
        made.step(step, 3.0)
        made.run.event("eval", step=step, val_bpb=2 - step / 100)
    (made.run.path / "link").symlink_to("/etc/passwd")
    made.run.env.write_bytes(b"TOKEN=secret\0")
    return made.run


def packed(run: RunDir, out: Path, *argv: str) -> Path:
    assert command.main([str(run.path), f"--out={out}", *argv]) == Exit.DONE
    return out


@pytest.mark.parametrize("suffix", rundir.ARCHIVES)
def test_an_archive_reads_like_the_run(run: RunDir, tmp_path: Path, suffix: str) -> None:
    before = facts.read(run.path)
    out = packed(run, tmp_path / f"file{suffix}")
    with_weights = out.stat().st_size
    assert archive.verify(out)["left_out"] == ["link"]
    opened = archive.opened(out)
    assert opened.name == "a run"
    assert archive.opened(out).path == opened.path
    after = facts.read(opened.path)
    assert (after.state, after.loss, after.step) == (before.state, before.loss, before.step)
    assert after.config == before.config
    assert after.seconds == pytest.approx(before.seconds, abs=1)
    assert opened.metrics.read_bytes() == run.metrics.read_bytes()
    assert not opened.env.exists()
    assert not list(opened.path.rglob("state.pt"))
    small = packed(run, tmp_path / f"small{suffix}", "--without_checkpoints")
    assert small.stat().st_size < with_weights
    assert archive.opened(small).metrics.exists()


def test_plain_tar_unpacks_the_run(run: RunDir, tmp_path: Path) -> None:
    out = packed(run, tmp_path / "file.tar.gz")
    subprocess.run(["tar", "-xf", str(out), "-C", str(tmp_path)], check=True)
    weights = "checkpoints/step_00000020/state.pt"
    assert (tmp_path / "a run" / weights).read_bytes() == (run.path / weights).read_bytes()


def test_commands_read_an_archive(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(packed(run, tmp_path / "file.tar.gz"))
    # nothing of the original is needed
    run.path.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert runs.main([out, "--json"]) == Exit.DONE
    assert [r["name"] for r in json.loads(capsys.readouterr().out)["runs"]] == ["a run"]
    assert report.main([out]) == Exit.DONE
    assert (tmp_path / "a run.html").stat().st_size > 1000
    capsys.readouterr()
    assert diagnose.main([out, "--json"]) == Exit.DONE
    assert json.loads(capsys.readouterr().out)["cause"] is not None
    chosen = options.parse([out, "--once"])
    found = options.find(chosen, tmp_path)[0]
    assert found is not None
    assert state.RunWatch(found).read_all()["run"]["state"] == "finished"


def test_the_weights_of_an_archive_must_be_unpacked(run: RunDir, tmp_path: Path) -> None:
    out = packed(run, tmp_path / "file.tar.gz")
    with pytest.raises(UserError) as error:
        weights.find(str(out), tmp_path, command.ASKER)
    (problem,) = error.value.problems
    assert (problem.code, problem.fixes) == ("run.archived", [f"tar -xf {out}"])
    small = packed(run, tmp_path / "small.tar.gz", "--without_checkpoints")
    with pytest.raises(UserError) as error:
        weights.find(str(small), tmp_path, command.ASKER)
    (problem,) = error.value.problems
    assert problem.fixes == ["./duet archive 'a run'"] and "--without_checkpoints" in problem.what


@each("name", ["metrics.jsonl", "checkpoints"])
def test_a_file_of_the_run_that_cannot_be_read(
    name: str, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output was blamed."""
    denied = run.path / name

    def walk(top: Path, onerror: Callable[[OSError], None]) -> list[object]:
        onerror(PermissionError(errno.EACCES, "Permission denied", str(denied)))
        return []

    def opened(path: Path, *args: Any, **more: Any) -> Any:
        if path == denied:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open(path, *args, **more)

    if name == "checkpoints":
        monkeypatch.setattr(os, "walk", walk)
    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(UserError) as error:
        command.pack(run, tmp_path / "file.tar.gz", checkpoints=True)
    (problem,) = error.value.problems
    assert error.value.code == Exit.RESOURCES and str(denied) in problem.what
    assert problem.fixes == [f"chmod u+rX '{denied}'"]


def test_the_processes_of_an_archived_run_are_not_those_of_this_machine(tmp_path: Path) -> None:
    made = Made(tmp_path / "runs" / "died").supervisor(1 << 30).beats()
    out = packed(made.run, tmp_path / "file.tar.gz")
    # on the other machine the numbers belong to living processes
    opened = archive.opened(out)
    record = rundir.read_json(opened.supervisor) or {}
    rundir.write_json(opened.supervisor, {**record, "pid": os.getpid(), "host": "far"})
    assert facts.read(opened.path).state == "died"
    watched = state.RunWatch(opened).read()
    assert watched["run"]["state"] == "died"
    assert not any(rank["alive"] for rank in watched["ranks"])
    assert result.diagnose([opened.path])["cause"] == "unknown"


def test_a_damaged_archive_is_refused(run: RunDir, tmp_path: Path, cache: Path) -> None:
    whole = packed(run, tmp_path / "file.tar.gz").read_bytes()
    unpacked, metrics = gzip.decompress(whole), run.metrics.read_bytes()
    changed = gzip.compress(unpacked.replace(metrics, metrics.swapcase()))
    contents = (whole[:500], changed, b"\0" + whole[1:], b"", b"not an archive" * 99)
    for number, content in enumerate(contents):
        bad = tmp_path / f"bad{number}.tar.gz"
        bad.write_bytes(content)
        with pytest.raises(UserError) as error:
            archive.opened(bad)
        assert error.value.problems[0].code == "archive.damaged", number
    assert not list(cache.iterdir())


def test_an_archive_that_is_cut_off_is_not_empty(run: RunDir, tmp_path: Path, cache: Path) -> None:
    """tarfile calls it an empty file."""
    (bad := tmp_path / "cut.tar.zst").write_bytes(
        packed(run, tmp_path / "a.tar.zst").read_bytes()[:99]
    )
    with pytest.raises(UserError) as error:
        archive.opened(bad)
    assert msg("core.archive.cut_off") in error.value.problems[0].what


@pytest.mark.parametrize("suffix", rundir.ARCHIVES)
def test_the_weights_of_a_copy_can_be_verified(
    run: RunDir, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    weights_file = max(run.path.rglob(archive.STATE))
    weights_file.write_bytes(os.urandom(1 << 20))
    out = packed(run, tmp_path / f"whole{suffix}")
    capsys.readouterr()
    assert command.main([str(out)]) == Exit.DONE
    count = units.plural(len(archive.verify(out)["files"]), "file")
    assert capsys.readouterr().out == msg("cli.archive.intact", file=out, count=count) + "\n"
    short = tmp_path / f"short{suffix}"
    short.write_bytes(out.read_bytes()[: -(1 << 19)])
    archive.opened(short)  # which reads no weights
    assert command.main([str(short)]) == Exit.CONFIG
    with pytest.raises(UserError) as error:
        archive.checked(short)
    assert [problem.code for problem in error.value.problems] == ["archive.damaged"]


def _foreign(out: Path, change: Callable[[tarfile.TarInfo], None]) -> Path:
    """An archive with one changed member."""
    content = b"hello"
    with tarfile.open(out, "w:gz") as tar:
        member = tarfile.TarInfo("run/plan.json")
        member.size = len(content)
        change(member)
        checksum = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
        listed = {member.name: {"bytes": member.size, "sha256": checksum}}
        index = {"version": 1, "name": "run", "files": listed, "created": 0.0, "left_out": []}
        first = tarfile.TarInfo(archive.INDEX)
        data = json.dumps(index).encode()
        first.size = len(data)
        tar.addfile(first, io.BytesIO(data))
        tar.addfile(member, io.BytesIO(content))
    return out


def test_unsafe_members_are_refused(tmp_path: Path, cache: Path) -> None:
    def kind(type_: bytes, target: str = "") -> Callable[[tarfile.TarInfo], None]:
        def change(member: tarfile.TarInfo) -> None:
            member.type, member.linkname, member.size = type_, target, 0

        return change

    def name(text: str) -> Callable[[tarfile.TarInfo], None]:
        return lambda member: setattr(member, "name", text)

    for number, change in enumerate(
        (
            *map(name, ("run/../../evil", "/tmp/evil", "other/plan.json", "run/./x", "run//x")),
            kind(tarfile.SYMTYPE, "/etc/passwd"),
            kind(tarfile.LNKTYPE, "/etc/passwd"),
            kind(tarfile.FIFOTYPE),
            kind(tarfile.CHRTYPE),
        )
    ):
        with pytest.raises(UserError) as error:
            archive.opened(_foreign(tmp_path / f"file{number}.tar.gz", change))
        assert error.value.problems[0].code == "archive.unsafe", number
    assert not list(cache.iterdir())
    assert not (tmp_path / "evil").exists()
    good = archive.opened(_foreign(tmp_path / "good.tar.gz", lambda member: None))
    assert good.plan.read_bytes() == b"hello"


def test_a_run_that_changes_meanwhile_leaves_no_archive(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = command._sha256
    monkeypatch.setattr(command, "_sha256", lambda path: (real(path)[0][::-1], real(path)[1]))
    out = tmp_path / "file.tar.gz"
    assert command.main([str(run.path), f"--out={out}"]) == Exit.RESOURCES
    assert not [path for path in tmp_path.iterdir() if "file" in path.name]


def test_bad_input_is_answered_at_once(run: RunDir, tmp_path: Path) -> None:
    live = Made(tmp_path / "experiments" / "live").steps(5).supervisor(os.getpid()).run
    (tmp_path / "there.tar.gz").write_bytes(b"")
    for argv, codes in (
        (["nosuch", "--out=x.zip"], ["run.missing", "output.suffix"]),
        (["live", f"--out={tmp_path}/there.tar.gz"], ["run.live", "output.exists"]),
        (
            ["a", "b", "--out=/no/where/x.tar.gz"],
            ["run.several", "run.missing", "output.no_folder"],
        ),
    ):
        with pytest.raises(UserError) as error:
            command.options(argv, tmp_path)
        assert [problem.code for problem in error.value.problems] == codes, argv
    assert find_run.find("live", tmp_path / "experiments", command.ASKER).path == live.path


def _crafted(out: Path, index: object, *headers: bytes, **facts: object) -> Path:
    """An archive with this index, followed by raw headers."""
    content = json.dumps(index).encode()
    member = tarfile.TarInfo(archive.INDEX)
    member.size = len(content)
    with tarfile.open(out, "w:gz") as tar:
        tar.addfile(member, io.BytesIO(content))
        for header in headers:
            tar.fileobj.write(header)  # type: ignore[union-attr]
    return out


def test_a_crafted_archive_is_an_error_and_never_a_traceback(tmp_path: Path, cache: Path) -> None:
    good = {"version": 1, "name": "run", "created": 0.0, "left_out": []}
    one = {"bytes": 1, "sha256": "0"}
    nan = tarfile.TarInfo("run/plan.json")
    nan.pax_headers = {"mtime": "nan"}
    large = tarfile.TarInfo("x")
    large.type, large.size = tarfile.XHDTYPE, 1 << 40
    sparse = tarfile.TarInfo("run/plan.json")
    sparse.type = tarfile.GNUTYPE_SPARSE
    plan = {"run/plan.json": {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}}
    for number, (index, headers, code) in enumerate(
        (
            ({**good, "files": {"run/plan.json": 5}}, [], "damaged"),
            ({**good, "files": {"run/plan.json": {}}}, [], "damaged"),
            ({**good, "files": {}}, [], "damaged"),
            ({**good, "files": {}, "name": "a\0b"}, [], "unsafe"),
            ({**good, "files": {}, "name": "\ud800"}, [], "damaged"),
            ({**good, "files": {"run/zeros": {**one, "bytes": 1 << 60}}}, [], "damaged"),
            ({**good, "files": plan}, [nan.tobuf(tarfile.PAX_FORMAT)], "damaged"),
            ({**good, "files": plan}, [large.tobuf(tarfile.GNU_FORMAT)], "unsafe"),
            ({**good, "files": plan}, [sparse.tobuf(tarfile.GNU_FORMAT)], "unsafe"),
        )
    ):
        file = tmp_path / f"file{number}.tar.gz"
        with pytest.raises(UserError) as error:
            archive.opened(_crafted(file, index, *headers))
        assert error.value.problems[0].code == f"archive.{code}", number
    assert not list(cache.iterdir())


def test_the_cache_belongs_to_this_user_alone(
    run: RunDir, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = packed(run, tmp_path / "file.tar.gz")
    monkeypatch.setattr(archive.tempfile, "tempdir", str(tmp_path))
    old = os.umask(0)
    try:
        assert archive.opened(out).path.is_relative_to(cache)
    finally:
        os.umask(old)
    assert cache.stat().st_mode & 0o777 == 0o700
    cache.chmod(0o777)
    own = tmp_path / f"duet-{os.getuid()}"
    assert archive.opened(out).path.is_relative_to(own / "archives")
    own.rename(tmp_path / "elsewhere")
    own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError):
        archive.opened(out)


def test_what_belongs_to_one_machine_is_left_out(run: RunDir, tmp_path: Path) -> None:
    other = RunDir(run.path, node=1)
    other.own.mkdir()
    for file in (other.env, other.argv, other.supervisor):
        file.write_bytes(b"TOKEN=secret\0")
    files = archive.verify(packed(run, tmp_path / "file.tar.gz"))["files"]
    assert [name for name in files if "/node1/" in name] == ["a run/node1/supervisor.json"]


def test_what_a_killed_process_unpacked_is_removed(
    run: RunDir, tmp_path: Path, cache: Path
) -> None:
    for name, age_s in (("old", 2 * archive.ABANDONED_S), ("new", 60.0)):
        (cache / f"{archive.UNPACKING}{name}").mkdir(parents=True)
        os.utime(cache / f"{archive.UNPACKING}{name}", (0, time.time() - age_s))
    archive.opened(packed(run, tmp_path / "file.tar.gz"))
    assert [path.name for path in cache.glob(f"{archive.UNPACKING}*")] == [
        f"{archive.UNPACKING}new"
    ]


def test_files_of_any_name(run: RunDir, tmp_path: Path) -> None:
    names = [b"two\nlines", b"\xff\xfe", b" spaces ", "数据".encode(), b"x" * 150]
    for name in names:
        Path(os.fsdecode(os.fsencode(run.ranks) + b"/" + name)).write_bytes(name)
    out = packed(run, tmp_path / "file.tar.zst")
    there = os.listdir(os.fsencode(archive.opened(out).ranks))
    assert {*names} <= {*there}


def test_two_readers_unpack_at_once(run: RunDir, tmp_path: Path, cache: Path) -> None:
    out = packed(run, tmp_path / "file.tar.gz")
    code = f"from training.core import archive; from pathlib import Path; print(archive.opened(Path({str(out)!r})).path)"
    readers = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for _ in range(3)
    ]
    paths = {reader.communicate()[0].strip() for reader in readers}
    assert len(paths) == 1
    assert RunDir(paths.pop()).metrics.read_bytes() == run.metrics.read_bytes()
    assert len(list(cache.iterdir())) == 1


def test_secrets_of_a_command_line_are_left_out(run: RunDir, tmp_path: Path) -> None:
    plan = rundir.read_json(run.plan) or {}
    args = ["--api_key=abc", "--hf-token", "def", "--epochs", "3"]
    rundir.write_json(run.plan, plan | {"script": {"path": "s.py", "args": args}})
    opened = archive.opened(packed(run, tmp_path / "file.tar.gz"))
    kept = (rundir.read_json(opened.plan) or {})["script"]["args"]
    assert kept == ["--api_key=…", "--hf-token", "…", "--epochs", "3"]
    assert (rundir.read_json(run.plan) or {})["script"]["args"] == args


def test_a_name_with_control_characters_is_unsafe(tmp_path: Path) -> None:
    index = {"version": 1, "duet_version": "", "name": "a\x1b[31m", "created": 0.0, "files": {}}
    out = _crafted(tmp_path / "file.tar.gz", index | {"left_out": []})
    with pytest.raises(UserError) as caught:
        archive.opened(out)
    assert [problem.code for problem in caught.value.problems] == ["archive.unsafe"]
