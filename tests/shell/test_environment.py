"""Creation of the environment .venv with real scripts, venv and pip, and small packages instead of
gigabytes. The choice of Python is tested in python.bats."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pexpect
import pytest

from tests.conftest import ROOT, processes, wait_until
from tests.shell import wheels
from tests.shell.first_user import START, User, names, python_without


@pytest.fixture
def by_uv(user: User, tmp_path: Path) -> User:
    """The same user on a machine that has uv."""
    (tmp_path / "uv").mkdir()
    (tmp_path / "uv/uv").symlink_to(ROOT / ".venv/bin/uv")
    user.env |= {
        "PATH": f"{user.env['PATH']}:{tmp_path / 'uv'}",
        "UV_CACHE_DIR": str(tmp_path / "cache"),
    }
    return user


def test_uv_installs_where_it_is_on_the_machine(by_uv: User, tmp_path: Path) -> None:
    """From where pip would take the packages: uv does not read pip's settings."""
    bare = python_without(tmp_path / "bare")  # nor does it need a pip
    by_uv.env["PATH"] = f"{bare / 'bin'}:{by_uv.env['PATH']}"
    done = by_uv.plan()
    assert len(done.err.splitlines()) == 2
    log = (by_uv.venv / "install.log").read_text()
    assert "# packages by uv" in log and "by pip" not in log and f" + torch=={wheels.TORCH}" in log
    assert names(by_uv) == set(wheels.PACKAGES)
    assert by_uv.plan().err == ""


def test_pip_installs_where_uv_fails(by_uv: User, tmp_path: Path) -> None:
    (tmp_path / "uv/uv").unlink()
    (tmp_path / "uv/uv").write_text("#!/bin/sh\necho 'error: no way in' >&2\nexit 2\n")
    (tmp_path / "uv/uv").chmod(0o755)
    by_uv.plan()
    log = (by_uv.venv / "install.log").read_text()
    assert "error: no way in" in log and "Successfully installed" in log
    assert names(by_uv) == set(wheels.PACKAGES)


@pytest.mark.slow
def test_kill_9_of_uv(by_uv: User, index: Path, token: str) -> None:
    """pip does not continue in its place."""
    with wheels.Index(index, gated="wandb") as slow:
        process = by_uv.start(PIP_FIND_LINKS=slow.url)
        assert slow.asked.wait(60)
        (pid,) = (pid for pid, line in processes(token).items() if "uv pip install" in line)
        os.kill(pid, signal.SIGKILL)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 3 and "uv failed" in err
    assert "by pip" not in (by_uv.venv / "install.log").read_text()


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


SOURCES = """
import sys; sys.path.insert(0, sys.argv[1])
import os
from training.host import package_sources
print(*package_sources.uv_sources(os.environ), sep="\\n")
"""


@pytest.mark.parametrize(
    ("config", "env", "words"),
    [
        ("", {}, []),
        ("[global]\nindex-url = https://a/simple\n", {}, ["--index-url=https://a/simple"]),
        (
            "[global]\nfind-links = /w\nextra-index-url =\n    file:///a\n    "
            "file:///b\n[install]\nfind-links = /x\n",
            {"PIP_NO_INDEX": "1"},
            [
                "--extra-index-url=file:///a",
                "--extra-index-url=file:///b",
                "--find-links=/x",
                "--no-index",
            ],
        ),
        ("[global]\nfind_links = /w\n", {"PIP_FIND_LINKS": "/mine"}, ["--find-links=/mine"]),
        (
            "[global]\nindex-url = https://a/simple\n",
            {"UV_DEFAULT_INDEX": "https://b/simple"},
            None,
        ),
        ("not a config", {}, None),
    ],
)
def test_uv_takes_packages_from_where_pip_does(
    config: str, env: dict[str, str], words: list[str] | None, tmp_path: Path
) -> None:
    (tmp_path / "pip.conf").write_text(config)
    known = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))} | {
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": "",
    }
    command = [sys.executable, "-c", SOURCES, str(ROOT)]
    done = subprocess.run(
        command,
        env=known | {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf")} | env,
        capture_output=True,
        text=True,
        check=True,
    )
    found = done.stdout.split()
    if words:
        assert found[-1] == "--index-strategy=unsafe-best-match", (
            "as pip: the best version of all of them"
        )
        assert set(words) <= set(found)
    elif words is None:
        assert found == [], "uv's own settings decide; a file that pip refuses does not"


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
    user.plan()
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
    user.plan(PYTHONPATH=str(mine), PIP_USER="1", PIP_REQUIRE_VIRTUALENV="1")
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
        assert "try:     git clone" in done.stderr and "Traceback" not in done.stderr
    finally:
        shutil.rmtree(copy)


def test_an_unwritable_folder(user: User) -> None:
    (user.folder / ".venv.lock").mkdir()
    done = user.run()
    assert done.code == 3
    assert (
        "the environment could not be created: [Errno" in done.err and "Traceback" not in done.err
    )
