"""Creation of the environment .venv, killed or interrupted, or started by two runs at once."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.conftest import ROOT, processes, wait_until
from tests.shell import wheels
from tests.shell.first_user import User, names, python_without


@pytest.mark.parametrize(
    "victim",
    [
        "the script",
        *(
            pytest.param(victim, marks=pytest.mark.soak)
            for victim in ("its group", "environment.py", "pip")
        ),
    ],
)
def test_kill_9_in_the_middle(user: User, index: Path, token: str, victim: str) -> None:
    """No process continues to install, and the next run starts over."""
    with wheels.Index(index, gated="wandb") as slow:
        process = user.start(PIP_FIND_LINKS=slow.url)
        assert slow.asked.wait(60)
        assert (user.venv / "bin/python").exists() and not (user.venv / "duet.stamp").exists()
        if victim == "its group":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            mark = {
                "the script": "train_dual_gpu.sh",
                "environment.py": "environment.py make",
                "pip": "-r ",
            }[victim]
            (pid,) = (pid for pid, line in processes(token).items() if mark in line)
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=20)
        assert process.returncode not in (0, 2)
        wait_until(lambda: not processes(token), 8, "nothing is left")
        slow.open()
        assert "creating the environment" in user.plan(PIP_FIND_LINKS=slow.url).err
    assert names(user) == set(wheels.PACKAGES)


@pytest.mark.slow
def test_kill_9_while_packages_are_copied(user: User) -> None:
    """Half of the packages and bin/python exist; only the stamp is missing."""
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
        assert "interrupted while installing (exit 130)" in err
        assert "Traceback" not in err
        wait_until(lambda: not processes(token), 8, "nothing is left")
    user.plan()


def _ask_for(user: User, line: str) -> None:
    with (user.folder / "requirements.lock").open("a") as lock:
        lock.write(line)


def test_the_old_environment_stays_until_the_new_one_is_complete(user: User, index: Path) -> None:
    """Without the new package, after Ctrl-C and after a kill; then it is used again."""
    user.plan()
    old, good = user.folder / ".venv.old", (user.folder / "requirements.lock").read_text()
    _ask_for(user, "no-such-package==1.0\n")
    failed = user.run()
    assert failed.code == 3 and not old.exists() and names(user) == set(wheels.PACKAGES)
    assert "no-such-package" in (user.venv / "install.log").read_text()
    for number in (signal.SIGINT, signal.SIGKILL):
        (user.folder / "requirements.lock").write_text(good)
        _ask_for(user, "# another\n")
        with wheels.Index(index, gated="wandb") as slow:
            process = user.start(PIP_FIND_LINKS=slow.url)
            assert slow.asked.wait(60)
            assert (old / "duet.stamp").exists() and not (user.venv / "duet.stamp").exists()
            os.killpg(process.pid, number)
            process.communicate(timeout=20)
        assert old.exists() == (number == signal.SIGKILL)
    (user.folder / "requirements.lock").write_text(good)
    begun = user.venv.stat().st_ino, old.stat().st_ino
    user.plan()
    assert user.venv.stat().st_ino == begun[1], "nothing is installed again"
    assert not old.exists() and names(user) == set(wheels.PACKAGES)
    (user.folder / "requirements.lock").write_text(good.replace("wandb==0.31.0\n", ""))
    user.plan()
    assert not old.exists() and "wandb" not in names(user)


def test_an_old_environment_that_cannot_be_renamed(user: User) -> None:
    """A volume mounted at .venv, and a .venv in a layer of an image: emptied in place."""
    user.plan()
    make = """
import os, pathlib, sys
sys.path.insert(0, "lib")
import environment
def rename(*_): raise OSError(int(sys.argv[1]), os.strerror(int(sys.argv[1])))
pathlib.Path.rename = rename
sys.exit(environment.main(["make", os.getcwd(), "another lock"]))
"""
    for number in (errno.EBUSY, errno.EXDEV):
        (user.venv / "old").touch()
        (user.venv / "duet.stamp").write_text("old")
        made = user.run("python3", "-c", make, str(number))
        assert made.code == 0, made.err
        assert (user.venv / "duet.stamp").read_text() == "another lock"
        assert names(user) == set(wheels.PACKAGES) and not (user.venv / "old").exists()


@pytest.mark.parametrize("program", ["{venv}/bin/python", ".venv/bin/python", "python"])
def test_an_environment_in_use_is_not_replaced(user: User, program: str) -> None:
    user.plan()
    _ask_for(user, "# another\n")
    active = f"{user.venv}/bin:{user.env['PATH']}"
    command = [program.format(venv=user.venv), "-c", "import time; time.sleep(99)", "a run"]
    sleeper = user.start(*command, PATH=active)
    wait_until(lambda: b"a run" in Path(f"/proc/{sleeper.pid}/cmdline").read_bytes(), 8, "runs")
    done = user.run()
    assert done.code == 3 and f"process {sleeper.pid} runs from it" in done.err
    assert names(user) == set(wheels.PACKAGES) and (user.venv / "duet.stamp").exists()
    sleeper.kill()
    sleeper.wait()
    # its own Python makes it
    assert "environment ready" in user.plan(PATH=active).err


@pytest.mark.slow
def test_an_activated_environment_with_the_only_pip_and_uv(user: User, tmp_path: Path) -> None:
    """Both are gone when the new one is filled. The project is reached by a link."""
    bare, link = python_without(tmp_path / "bare"), tmp_path / "link"
    user.env["PATH"] = f"{bare / 'bin'}:{user.env['PATH']}"
    link.symlink_to(user.folder)
    user.plan()
    (user.venv / "bin/uv").symlink_to(ROOT / ".venv/bin/uv")
    _ask_for(user, "# another\n")
    made = user.plan(PATH=f"{link}/.venv/bin:{user.env['PATH']}")
    assert f"with {link}/.venv/bin/python3 again" in made.err
    assert names(user) >= {"pip", *wheels.PACKAGES}


@pytest.mark.slow
def test_two_first_runs_at_once(user: User, index: Path) -> None:
    with wheels.Index(index, gated="wandb") as slow:
        first = user.start(PIP_FIND_LINKS=slow.url)
        assert slow.asked.wait(60)
        second = user.start(PIP_FIND_LINKS=slow.url)
        assert second.stderr
        said = ""
        while "waiting: another run is creating the environment" not in said:
            line = second.stderr.readline()
            assert line, said
            said += line
        slow.open()
        for process in (first, second):
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            assert out.startswith("Plan (dry run")
    assert slow.downloads["torch"] == slow.downloads["wandb"] == 1, "the second installed nothing"
