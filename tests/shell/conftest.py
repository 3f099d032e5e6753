"""Fixtures of the shell tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import GONE_WITHIN_S, TOKEN, processes, wait_until
from tests.shell import wheels
from tests.shell.first_user import PERSONAL, User


@pytest.fixture(scope="module")
def module_token() -> Iterator[str]:
    """Like `token`, for processes that the tests of a module share."""
    value = uuid.uuid4().hex
    yield value
    try:
        wait_until(
            lambda: not processes(value), GONE_WITHIN_S, "every process of these tests has ended"
        )
    finally:
        for pid in processes(value):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small wheels, and the lock file that wants them."""
    folder = tmp_path_factory.mktemp("wheels")
    (folder / "requirements.lock").write_text(wheels.write_all(folder))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has pip and nothing else, as on a fresh machine."""
    folder = tmp_path_factory.mktemp("base")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder


@pytest.fixture
def new_user(project: Path, tmp_path: Path, token: str) -> Callable[[Path], User]:
    """Make a user whose `python3` is that of this environment."""

    def make(python: Path) -> User:
        folder = tmp_path / "my user's work" / "du et"
        shutil.copytree(
            project,
            folder,
            ignore=lambda where, _: (".venv", ".venv.lock") if where == str(project) else (),
        )
        env = {
            k: v for k, v in os.environ.items() if k not in PERSONAL and not k.startswith("DUET_")
        }
        (tmp_path / "tmp").mkdir()  # a killed pip leaves folders there
        path = [
            str(python / "bin"),
            *(p for p in os.environ["PATH"].split(":") if not os.access(f"{p}/uv", os.X_OK)),
        ]
        return User(
            folder, env | {TOKEN: token, "TMPDIR": str(tmp_path / "tmp"), "PATH": ":".join(path)}
        )

    return make


@pytest.fixture
def user(new_user: Callable[[Path], User], base: Path, index: Path) -> Iterator[User]:
    """A user with the small packages as the only source."""
    someone = new_user(base)
    shutil.copy(index / "requirements.lock", someone.folder)
    someone.env = {k: v for k, v in someone.env.items() if not k.startswith(("PIP_", "UV_"))} | {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_FIND_LINKS": str(index),
        "NO_PROXY": "127.0.0.1",
    }
    yield someone
    # a failed test may leave a process: kill it and close its pipes
    for process in someone.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
