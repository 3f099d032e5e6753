"""Creation of the environment .venv with real scripts, venv and pip, and small packages instead of
gigabytes. The choice of Python is tested in python.bats."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pexpect
import pytest

from tests.shell import wheels
from tests.shell.first_user import START, User, names, python_without
from training.core.project import ROOT


def test_one_line_shows_the_progress(user: User, index: Path) -> None:
    """On a terminal: in place, until the line with the seconds."""
    with wheels.Index(index, gated="wandb") as slow:
        child = pexpect.spawn(
            START[0],
            START[1:],
            cwd=user.folder,
            env=user.env | {"PIP_FIND_LINKS": slow.url, "TERM": "xterm"},
            timeout=60,
        )
        child.expect(r"creating the environment .venv with ")
        child.expect(
            r"\r\x1b\[Kcreating the environment .venv: fetching wandb.* \(\d+ packages.*\), \d+ s"
        )
        slow.open()
        child.expect(r"environment ready")
        child.expect(pexpect.EOF)
        child.close()
    assert child.exitstatus == 0


def test_a_later_section_of_the_lock_is_added_once(user: User, index: Path, tmp_path: Path) -> None:
    for name in ("pyarrow", "nvitop"):
        wheels.write_wheel(index, name, "1.0", {f"{name}/__init__.py": b""})
    with (user.folder / "requirements.lock").open("a") as lock:
        lock.write("# [extras] why\npyarrow==1.0\n# [peers]\nnvitop==1.0\n")
    user.plan()
    assert names(user) == set(wheels.PACKAGES), "the first run installs the first section"
    add = ["bash", "-c", 'source lib/init.sh; venv::add "$@"', "make"]
    assert "installed [extras] of requirements.lock" in user.run(*add, "extras").err
    assert "pyarrow" in names(user) and user.run(*add, "extras").err == ""
    beside = tmp_path / "the peers"
    assert f"into {beside}" in user.run(*add, "peers", str(beside)).err
    assert (beside / "nvitop").is_dir() and "nvitop" not in names(user)
    (beside / "nvitop/old").touch()
    assert user.run(*add, "peers", str(beside)).err == "" and (beside / "nvitop/old").exists()
    lock_text = (user.folder / "requirements.lock").read_text()
    (user.folder / "requirements.lock").write_text(
        lock_text.replace("nvitop==1.0", "nvitop==1.0\ntqdm==4.0")
    )
    user.run(*add, "peers", str(beside))
    assert (beside / "tqdm").is_dir() and not (beside / "nvitop/old").exists(), (
        "made again, nothing old stays"
    )


def test_the_first_run_makes_it_and_the_second_uses_it(user: User) -> None:
    first = user.plan()
    assert (
        f"creating the environment .venv with {user.env['PATH'].partition(':')[0]}/python3"
        in first.err
    )
    assert len(first.err.splitlines()) == 2, (
        "begin and end; progress is for terminals, and for what takes long"
    )
    written = user.venv / "install.log"
    log, at = written.read_text(), written.stat().st_mtime_ns
    assert "Successfully installed" in log and "Successfully installed" not in first.err
    assert re.search(rf"environment ready: {user.venv} \(\d+ s\)\n", first.err)
    assert names(user) == set(wheels.PACKAGES)
    second = user.plan()
    assert second.err == "" and written.stat().st_mtime_ns == at, "nothing is installed again"
    assert not (user.folder / "experiments").exists() and [
        p.name for p in (user.folder / "logs").iterdir()
    ] == [".gitkeep"]


@pytest.mark.slow
def test_another_lock_file_makes_it_again_and_nothing_old_stays(user: User, index: Path) -> None:
    user.plan()
    lock = user.folder / "requirements.lock"
    wheels.write_wheel(index, "tqdm", "5.0", {"tqdm/__init__.py": b""})
    lock.write_text(
        lock.read_text().replace("tqdm==4.0", "tqdm==5.0").replace("wandb==0.31.0\n", "")
    )
    assert "creating the environment" in user.plan().err
    assert user.installed()["tqdm"] == "5.0" and "wandb" not in user.installed()


@pytest.mark.slow
def test_a_python_that_is_gone_or_has_become_another(user: User) -> None:
    """After an upgrade of the system: the stamp is right, the interpreter is not."""
    user.plan()
    python = user.venv / "bin/python"
    target = python.resolve()
    python.unlink()
    python.symlink_to("/nowhere/python3.11")
    assert "creating the environment" in user.plan().err
    (user.venv / "lib" / target.name).rename(user.venv / "lib/python3.9")
    assert "creating the environment" in user.plan().err
    assert user.plan().err == ""


def test_an_unavailable_package(user: User) -> None:
    lock = user.folder / "requirements.lock"
    good = lock.read_text()
    lock.write_text(good + "no-such-package==1.0\n")
    done = user.run()
    assert done.code == 3 and done.out == ""
    assert "no-such-package" in done.err, "pip's own message"
    assert re.search(
        rf"    try:     .*bin/python.* install -r .*{user.venv.name}/requirements.txt", done.err
    ), "the command that failed"
    assert f"full log: {user.venv / 'install.log'}" in done.err
    assert "[ERROR]" in done.err and "the environment could not be created: pip failed" in done.err
    assert user.run().code == 3, "and it does not count as made"
    lock.write_text(good)
    user.plan()


@pytest.mark.parametrize(
    "pip",
    [pytest.param("none", marks=pytest.mark.slow), pytest.param("too old", marks=pytest.mark.soak)],
)
def test_a_python_without_a_usable_pip(user: User, tmp_path: Path, pip: str) -> None:
    """The environment gets its own pip from ensurepip."""
    bare = python_without(tmp_path / "bare")
    if pip == "too old":  # before 22.2 there was no runner for another environment
        old = next(bare.glob("lib/python3*/site-packages")) / "pip"
        old.mkdir()
        (old / "__init__.py").touch()
    user.env["PATH"] = f"{bare / 'bin'}:{user.env['PATH']}"
    mine = tmp_path / "mine"  # the current folder, with a module named as one of Python
    mine.mkdir()
    (mine / "logging.py").write_text("raise SystemExit(1)")
    made = user.run("bash", "-c", 'source lib/init.sh; cd "$1"; venv::make', "make", str(mine))
    assert made.code == 0, made.err
    assert "pip" in names(user) and names(user) >= set(wheels.PACKAGES)


def test_a_python_without_venv(user: User, tmp_path: Path) -> None:
    bare = python_without(tmp_path / "bare", "venv")
    user.env["PATH"] = f"{bare / 'bin'}:{user.env['PATH']}"
    done = user.run()
    assert done.code == 3 and done.out == ""
    assert "`python3 -m venv` failed (try: apt-get install python3-venv) (exit 3)" in done.err


@pytest.mark.slow
def test_pythonpath_and_pip_settings_of_the_user_are_ignored(user: User, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    wheels.unpack(mine, wheels.metadata_files("tqdm", "4.0"))
    (tmp_path / "constraint.txt").write_text("tqdm==3.0\n")  # as in NVIDIA's images of PyTorch
    user.plan(
        PYTHONPATH=str(mine),
        PYTHONSAFEPATH="1",
        PIP_USER="1",
        PIP_REQUIRE_VIRTUALENV="1",
        PIP_CONSTRAINT=str(tmp_path / "constraint.txt"),
    )
    assert "tqdm" in names(user)


@pytest.mark.slow
def test_a_venv_on_another_disk_stays_there(user: User, tmp_path: Path) -> None:
    large = tmp_path / "large disk"
    large.mkdir()
    user.venv.symlink_to(large)
    user.plan()
    assert user.plan().err == ""
    (user.folder / "requirements.lock").write_text(
        (user.folder / "requirements.lock").read_text().replace("wandb==0.31.0\n", "")
    )
    assert "creating the environment" in user.plan().err, (
        "it belongs to this project: created again"
    )
    assert (
        user.venv.is_symlink()
        and (large / "duet.stamp").exists()
        and "wandb" not in user.installed()
    )


@pytest.mark.parametrize("content", ["things of others", "the environment of another copy"])
def test_a_linked_folder_of_others_is_not_touched(user: User, tmp_path: Path, content: str) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thing").touch()
    if content != "things of others":
        (theirs / "duet.home").write_text("/another/copy")
        (theirs / "duet.stamp").write_text("of another lock file torch=")
    before = sorted(theirs.iterdir())
    user.venv.symlink_to(theirs)
    done = user.run()
    assert done.code == 3 and done.out == ""
    assert (
        f"{user.venv} links to {theirs}, which belongs to another project: remove the link"
        in done.err
    )
    assert sorted(theirs.iterdir()) == before


def test_without_a_lock_file_the_old_environment_stays(user: User) -> None:
    user.plan()
    (user.folder / "requirements.lock").unlink()
    done = user.run()
    assert done.code == 3 and "requirements.lock" in done.err and "Traceback" not in done.err
    assert names(user) == set(wheels.PACKAGES)


@pytest.mark.slow
def test_missing_files_are_noticed_and_the_environment_is_created_again(user: User) -> None:
    user.plan()
    site = next(user.venv.glob("lib/python3*/site-packages"))
    for lost in (
        site / "torch/__init__.py",
        next(site.glob("psutil/*.so")),
        user.venv / "pyvenv.cfg",
    ):
        lost.unlink()
        assert "again: it is damaged" in user.plan().err, lost
        assert lost.exists()
    (site / "tqdm/__init__.py").write_text("")  # empty in its wheel too: not damaged
    assert user.plan().err == ""


@pytest.mark.slow
def test_another_user_with_read_access_only(user: User) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    copy = Path(tempfile.mkdtemp(prefix="duet-reader-", dir="/tmp"))
    try:
        copy.chmod(0o755)
        project = copy / "du et"
        shutil.copytree(user.folder, project)
        reader = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        python = "/usr/bin/python3"
        if subprocess.run([*reader, python, "-c", ""], capture_output=True, check=False).returncode:
            pytest.skip("this user has no Python")
        env = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
        command = [
            *reader,
            "bash",
            str(project / "train_dual_gpu.sh"),
            str(project / "configs/dual_gpu/quickstart.py"),
            "--device=cpu",
        ]
        done = subprocess.run(
            [*command, "--help"], env=env, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        # What a start needs to write is checked before anything is installed.
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert (
            done.returncode == 3 and "--out_dir=" in done.stderr and "--log_dir=" in done.stderr
        ), done.stderr
        assert ".venv.lock" not in done.stderr
        elsewhere = [f"--out_dir={copy}/out", f"--log_dir={copy}/log"]
        (copy / "out").mkdir(mode=0o777), (copy / "log").mkdir(mode=0o777)
        for folder in ("out", "log"):
            (copy / folder).chmod(0o777)
        done = subprocess.run(
            [*command, *elsewhere], env=env, capture_output=True, text=True, check=False
        )
        assert (
            done.returncode == 3
            and f"{project}/.venv.lock is not writable by this user" in done.stderr
        ), done.stderr
        assert f"tar -C '{project}'" in done.stderr and "Traceback" not in done.stderr
    finally:
        shutil.rmtree(copy)


@pytest.mark.parametrize(
    ("number", "code", "shown"),
    [
        (errno.ENOSYS, 0, ""),
        (errno.ENOLCK, 0, ""),
        (errno.EBADF, 3, ".venv.lock is not writable by this user (Permission denied)"),
    ],
)
def test_a_file_system_without_locks(tmp_path: Path, number: int, code: int, shown: str) -> None:
    """Lustre without the option flock; NFS, where the lock file of another user cannot be held."""
    script = f"""
import fcntl, os, pathlib, sys
sys.path[:0] = [{str(ROOT / "lib")!r}, {str(ROOT)!r}]
import environment
def flock(*_): raise OSError({number}, os.strerror({number}))
fcntl.flock = flock
work = lambda lock: pathlib.Path("made").touch() or ""
sys.exit(environment._locked(pathlib.Path("."), "no environment", work))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code and shown in done.stderr
    assert (tmp_path / "made").exists() == (code == 0)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_folder_that_cannot_be_written(tmp_path: Path, number: int) -> None:
    """Of another user, and on a read-only file system, where an existing lock file will do."""
    script = f"""
import os, pathlib, sys
sys.path[:0] = [{str(ROOT / "lib")!r}, {str(ROOT)!r}]
import environment
reading = pathlib.Path.open
def opened(self, mode="r", *rest, **named):
    if mode == "a": raise OSError({number}, os.strerror({number}), str(self))
    return reading(self, mode, *rest, **named)
pathlib.Path.open = opened
sys.exit(environment._locked(pathlib.Path("."), "no environment", lambda lock: ""))
"""
    for code in (3, 0):
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert (".venv.lock is not writable by this user" in done.stderr) == (code == 3)
        (tmp_path / ".venv.lock").touch()


@pytest.mark.parametrize("full", [pytest.param("packages", marks=pytest.mark.slow), "venv"])
def test_a_disk_that_is_full_all_the_same(user: User, index: Path, full: str) -> None:
    """As by a quota, which the free space does not show."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no private mount namespace here (unshare -m)")
    if full == "packages":
        wheels.write_wheel(index, "filler", "1.0", {"filler/f.bin": os.urandom(3 << 20)})
        with (user.folder / "requirements.lock").open("a") as lock:
            lock.write("filler==1.0\n")
    user.venv.mkdir()
    size = {"packages": "4m", "venv": "4k"}[full]
    script = f"""mount -t tmpfs -o size={size} none .venv
code=0; "$@" || code=$?
find .venv ! -type d; exit $code"""
    done = user.run("unshare", "-m", "bash", "-c", script, "bash", *START)
    assert done.code == 3 and "Traceback" not in done.err, done.err
    assert os.strerror(errno.ENOSPC) in done.err and "duet-venv" in done.err
    kept = {Path(name).name for name in done.out.splitlines()}
    assert kept <= {"install.log", "requirements.txt"}, done.out


def test_an_unwritable_folder(user: User) -> None:
    (user.folder / ".venv.lock").mkdir()
    done = user.run()
    assert done.code == 3
    assert (
        "the environment could not be created: [Errno" in done.err and "Traceback" not in done.err
    )
