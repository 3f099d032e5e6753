"""The environment .venv by uv, where it is on the machine, and where uv takes packages from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, processes
from tests.shell import wheels
from tests.shell.first_user import User, names, python_without


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
    (tmp_path / "constraint.txt").write_text("tqdm==3.0\n")
    done = by_uv.plan(UV_CONSTRAINT=str(tmp_path / "constraint.txt"))
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
