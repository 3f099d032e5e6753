"""The environment .venv, really made: real scripts, venv and pip; small packages instead of the gigabytes.
Which Python is chosen, and when, is in python.bats."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.conftest import processes, wait_until
from tests.shell import wheels
from tests.shell.first_user import User, names, python_without


def test_the_first_run_makes_it_and_the_second_uses_it(user: User) -> None:
    first = user.plan()
    assert f"making the environment .venv with {user.env['PATH'].partition(':')[0]}/python3" in first.err
    for step in ("making an empty environment", "installing packages", "compiling what a start needs"):
        assert f"[INFO] {step}" in re.sub(r" \d{4}-\S+ \S+", "", first.err), "progress is shown"
    log = (user.venv / "install.log").read_text()
    assert "Successfully installed" in log and "Successfully installed" not in first.err
    assert f"environment ready: {user.venv}" in first.err
    assert names(user) == set(wheels.PACKAGES)
    second = user.plan()
    assert second.err == "" and second.seconds < 3.0, "nothing is installed again"
    assert not (user.folder / "experiments").exists() and [p.name for p in (user.folder / "logs").iterdir()] == [".gitkeep"]


@pytest.mark.slow
def test_another_lock_file_makes_it_again_and_nothing_old_stays(user: User, index: Path) -> None:
    user.plan()
    lock = user.folder / "requirements.lock"
    wheels.write_wheel(index, "tqdm", "5.0", {"tqdm/__init__.py": b""})
    lock.write_text(lock.read_text().replace("tqdm==4.0", "tqdm==5.0").replace("wandb==0.31.0\n", ""))
    assert "making the environment" in user.plan().err
    assert user.installed()["tqdm"] == "5.0" and "wandb" not in user.installed()


@pytest.mark.slow
def test_a_python_that_is_gone_or_has_become_another(user: User) -> None:
    """After an upgrade of the system: the stamp is right, the interpreter is not."""
    user.plan()
    python = user.venv / "bin/python"
    target = python.resolve()
    python.unlink()
    python.symlink_to("/nowhere/python3.11")
    assert "making the environment" in user.plan().err
    (user.venv / "lib" / target.name).rename(user.venv / "lib/python3.9")
    assert "making the environment" in user.plan().err
    assert user.plan().err == ""


def test_a_package_that_is_not_to_be_had(user: User) -> None:
    lock = user.folder / "requirements.lock"
    good = lock.read_text()
    lock.write_text(good + "no-such-package==1.0\n")
    done = user.run()
    assert done.code == 3 and done.out == ""
    assert "no-such-package" in done.err, "pip's own message"
    assert f"all of it: {user.venv / 'install.log'}" in done.err
    assert "[ERROR]" in done.err and "the environment could not be made: pip failed" in done.err
    assert user.run().code == 3, "and it does not count as made"
    lock.write_text(good)
    user.plan()


@pytest.mark.parametrize(
    "victim", ["the script", *(pytest.param(victim, marks=pytest.mark.soak) for victim in ("its group", "environment.py", "pip"))]
)
def test_kill_9_in_the_middle(user: User, index: Path, token: str, victim: str) -> None:
    """Nobody goes on installing behind our back, and the next run begins again."""
    with wheels.Index(index, gated="wandb") as slow:
        process = user.start(PIP_FIND_LINKS=slow.url)
        assert slow.asked.wait(60)
        assert (user.venv / "bin/python").exists() and not (user.venv / "duet.stamp").exists()
        if victim == "its group":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            mark = {"the script": "train_dual_gpu.sh", "environment.py": "environment.py make", "pip": "-r "}[victim]
            (pid,) = (pid for pid, line in processes(token).items() if mark in line)
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=20)
        assert process.returncode not in (0, 2)
        wait_until(lambda: not processes(token), 8, "nothing is left")
        slow.open()
        assert "making the environment" in user.plan(PIP_FIND_LINKS=slow.url).err
    assert names(user) == set(wheels.PACKAGES)


@pytest.mark.slow
def test_kill_9_while_packages_are_copied(user: User) -> None:
    """Half of the packages are there, bin/python too; only the stamp tells that it is not whole."""
    user.plan()
    shutil.rmtree(next(user.venv.glob("lib/python3*/site-packages/wandb")))
    (user.venv / "duet.stamp").unlink()
    user.plan()
    assert next(user.venv.glob("lib/python3*/site-packages/wandb")).is_dir()


@pytest.mark.slow
def test_ctrl_c_in_the_middle(user: User, index: Path, token: str) -> None:
    with wheels.Index(index, gated="wandb") as slow:
        process = user.start(PIP_FIND_LINKS=slow.url)
        assert slow.asked.wait(60)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
        _, err = process.communicate(timeout=20)
        assert process.returncode == 130
        assert "interrupted while making the environment (exit 130)" in err
        assert "Traceback" not in err
        wait_until(lambda: not processes(token), 8, "nothing is left")
    user.plan()


@pytest.mark.slow
def test_two_first_runs_at_once(user: User, index: Path) -> None:
    with wheels.Index(index, gated="wandb") as slow:
        first = user.start(PIP_FIND_LINKS=slow.url)
        assert slow.asked.wait(60)
        second = user.start(PIP_FIND_LINKS=slow.url)
        assert second.stderr
        said = ""
        while "waiting: another run is making the environment" not in said:
            line = second.stderr.readline()
            assert line, said
            said += line
        slow.open()
        for process in (first, second):
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            assert out.startswith("Plan (dry run")
    assert slow.downloads["torch"] == slow.downloads["wandb"] == 1, "the second installed nothing"


@pytest.mark.parametrize("pip", [pytest.param("none", marks=pytest.mark.slow), pytest.param("too old", marks=pytest.mark.soak)])
def test_a_python_without_a_usable_pip(user: User, tmp_path: Path, pip: str) -> None:
    """The environment gets a pip of its own from ensurepip."""
    bare = python_without(tmp_path / "bare")
    if pip == "too old":  # before 22.2 there was no runner for another environment
        old = next(bare.glob("lib/python3*/site-packages")) / "pip"
        old.mkdir()
        (old / "__init__.py").touch()
    user.env["PATH"] = f"{bare / 'bin'}:{user.env['PATH']}"
    user.plan()
    assert "pip" in names(user) and names(user) >= set(wheels.PACKAGES)


def test_a_python_without_venv(user: User, tmp_path: Path) -> None:
    bare = python_without(tmp_path / "bare", "venv")
    user.env["PATH"] = f"{bare / 'bin'}:{user.env['PATH']}"
    done = user.run()
    assert done.code == 3 and done.out == ""
    assert "`python3 -m venv` failed (try: apt-get install python3-venv) (exit 3)" in done.err


@pytest.mark.slow
def test_what_the_user_has_on_pythonpath_or_wants_of_pip_does_not_count(user: User, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    wheels.unpack(mine, wheels.metadata_files("tqdm", "4.0"))
    user.plan(PYTHONPATH=str(mine), PIP_USER="1", PIP_REQUIRE_VIRTUALENV="1")
    assert "tqdm" in names(user)


@pytest.mark.slow
def test_a_venv_on_another_disk_stays_there(user: User, tmp_path: Path) -> None:
    large = tmp_path / "large disk"
    large.mkdir()
    user.venv.symlink_to(large)
    user.plan()
    assert user.plan().err == ""
    (user.folder / "requirements.lock").write_text((user.folder / "requirements.lock").read_text().replace("wandb==0.31.0\n", ""))
    assert "making the environment" in user.plan().err, "it is ours: made again"
    assert user.venv.is_symlink() and (large / "duet.stamp").exists() and "wandb" not in user.installed()


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
    assert f"{user.venv} is a link to {theirs}, which was not made for this project: remove the link" in done.err
    assert sorted(theirs.iterdir()) == before


def test_without_a_lock_file_the_old_environment_stays(user: User) -> None:
    user.plan()
    (user.folder / "requirements.lock").unlink()
    done = user.run()
    assert done.code == 3 and "requirements.lock" in done.err and "Traceback" not in done.err
    assert names(user) == set(wheels.PACKAGES)


@pytest.mark.slow
def test_what_is_lost_is_noticed_and_made_again(user: User) -> None:
    user.plan()
    site = next(user.venv.glob("lib/python3*/site-packages"))
    for lost in (site / "torch/__init__.py", next(site.glob("psutil/*.so")), user.venv / "pyvenv.cfg"):
        lost.unlink()
        assert "again, since it is damaged" in user.plan().err, lost
        assert lost.exists()
    (site / "tqdm/__init__.py").write_text("")  # empty in its wheel too: that is no damage
    assert user.plan().err == ""


@pytest.mark.slow
def test_another_user_who_may_only_read(user: User) -> None:
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
        command = [*reader, "bash", str(project / "train_dual_gpu.sh"), str(project / "configs/dual_gpu/quickstart.py"), "--device=cpu"]
        done = subprocess.run([*command, "--help"], env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        # What a start needs to write is checked before anything is installed.
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 3 and "--out_dir=" in done.stderr and "--log_dir=" in done.stderr, done.stderr
        assert ".venv.lock" not in done.stderr
        elsewhere = [f"--out_dir={copy}/out", f"--log_dir={copy}/log"]
        (copy / "out").mkdir(mode=0o777), (copy / "log").mkdir(mode=0o777)
        for folder in ("out", "log"):
            (copy / folder).chmod(0o777)
        done = subprocess.run([*command, *elsewhere], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 3 and f"{project}/.venv.lock cannot be written by this user" in done.stderr, done.stderr
        assert "try:     git clone" in done.stderr and "Traceback" not in done.stderr
    finally:
        shutil.rmtree(copy)


def test_a_folder_that_can_not_be_written(user: User) -> None:
    (user.folder / ".venv.lock").mkdir()
    done = user.run()
    assert done.code == 3
    assert "the environment could not be made: [Errno" in done.err and "Traceback" not in done.err
