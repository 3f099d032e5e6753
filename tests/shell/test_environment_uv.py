"""The environment .venv by uv, where it is on the machine, and where uv takes packages from."""

from __future__ import annotations

import json
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


def test_settings_of_the_current_folder_are_not_used(
    by_uv: User, index: Path, tmp_path: Path
) -> None:
    wheels.write_wheel(index, "tqdm", "3.0", {"tqdm/__init__.py": b""})
    (tmp_path / "uv.toml").write_text('override-dependencies = ["tqdm==3.0"]\n')
    made = by_uv.run("bash", "-c", f"source lib/init.sh; cd '{tmp_path}'; venv::make")
    assert made.code == 0, made.err
    assert by_uv.installed()["tqdm"] == wheels.PACKAGES["tqdm"]


def test_pip_installs_where_uv_fails(by_uv: User, tmp_path: Path) -> None:
    """Also where Python has none of its own."""
    bare = python_without(tmp_path / "bare")
    by_uv.env["PATH"] = f"{bare / 'bin'}:{by_uv.env['PATH']}"
    (tmp_path / "uv/uv").unlink()
    (tmp_path / "uv/uv").write_text("#!/bin/sh\necho 'error: no way in' >&2\nexit 2\n")
    (tmp_path / "uv/uv").chmod(0o755)
    by_uv.plan()
    log = (by_uv.venv / "install.log").read_text()
    assert "error: no way in" in log and "Successfully installed" in log
    assert names(by_uv) >= set(wheels.PACKAGES)


@pytest.mark.slow
def test_pip_adds_where_uv_is_gone(by_uv: User, index: Path, tmp_path: Path) -> None:
    bare = python_without(tmp_path / "bare")
    by_uv.env["PATH"] = f"{bare / 'bin'}:{by_uv.env['PATH']}"
    wheels.write_wheel(index, "pyarrow", "1.0", {"pyarrow/__init__.py": b""})
    with (by_uv.folder / "requirements.lock").open("a") as lock:
        lock.write("# [extras] why\npyarrow==1.0\n")
    by_uv.plan()
    (tmp_path / "uv/uv").unlink()
    assert by_uv.run("bash", "-c", "source lib/init.sh; venv::add extras").code == 0
    assert {"pip", "pyarrow"} <= names(by_uv)


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


def test_a_password_of_an_index_is_not_shown(by_uv: User, tmp_path: Path) -> None:
    """Neither on uv's command line, which every user of the machine can read, nor on a failure."""
    (tmp_path / "uv/uv").unlink()
    seen = tmp_path / "seen"
    (tmp_path / "uv/uv").write_text(
        f"#!/bin/sh\necho \"$UV_EXTRA_INDEX_URL\" | tee '{seen}'\necho \"$@\" >>'{seen}'; kill -9 $$\n"
    )
    (tmp_path / "uv/uv").chmod(0o755)
    private = "https://me:geheim@packages.example/simple"
    by_uv.env["PIP_EXTRA_INDEX_URL"] = private
    done = by_uv.run()
    address, command = seen.read_text().splitlines()
    assert done.code == 3 and address == private and "geheim" not in command
    assert "UV_EXTRA_INDEX_URL=…" in done.err and "geheim" not in done.err
    assert "geheim" not in (by_uv.venv / "install.log").read_text()


SOURCES = """
import sys; sys.path.insert(0, sys.argv[1])
import json, os
from training.host import package_sources
print(json.dumps(package_sources.uv_sources(os.environ)))
"""


@pytest.mark.parametrize(
    ("config", "env", "variables", "options"),
    [
        ("", {}, {}, []),
        (
            "[global]\nindex-url = https://a/simple\n",
            {},
            {"UV_INDEX_URL": "https://a/simple"},
            [],
        ),
        (
            "[global]\nfind-links = /w\nextra-index-url =\n    file:///a\n    "
            "file:///b\n[install]\nfind-links = /x\n",
            {"PIP_NO_INDEX": "1"},
            {"UV_EXTRA_INDEX_URL": "file:///a file:///b", "UV_FIND_LINKS": "/x"},
            ["--no-index"],
        ),
        (
            "[global]\nfind_links = /w\n",
            {"PIP_FIND_LINKS": "/mine /too"},
            {"UV_FIND_LINKS": "/mine,/too"},
            [],
        ),
        # uv's own settings decide; a file that pip refuses does not
        (
            "[global]\nindex-url = https://a/simple\n",
            {"UV_DEFAULT_INDEX": "https://b/simple"},
            {},
            [],
        ),
        ("not a config", {}, {}, []),
    ],
)
def test_uv_takes_packages_from_where_pip_does(
    config: str,
    env: dict[str, str],
    variables: dict[str, str],
    options: list[str],
    tmp_path: Path,
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
    # as pip: the best version of all of them
    best = {"UV_INDEX_STRATEGY": "unsafe-best-match"} if variables or options else {}
    assert json.loads(done.stdout) == [variables | best, options]
