"""What lib/install.py reports where its programs fail."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
from pathlib import Path

import pytest

from tests.cases import each
from tests.conftest import ROOT

FULL = os.strerror(errno.ENOSPC)
NO_ENSUREPIP = "python: No module named ensurepip"
# of python3-venv for the Python that it belongs to
DISABLED = "ensurepip is disabled in Debian/Ubuntu for the system python."
INSTALLS_ALL = "apt-get install python3-venv"


@each(
    ("uv", "ensurepip", "pip", "shown", "full"),
    [
        # no pip at all: also names uv, which needs no root
        (None, NO_ENSUREPIP, None, (INSTALLS_ALL, "install uv", NO_ENSUREPIP), False),
        (None, DISABLED, None, (INSTALLS_ALL, "install uv", DISABLED), False),
        (None, "zlib is broken", None, ("-m ensurepip", "zlib is broken"), False),
        (None, FULL, None, ("-m ensurepip", FULL), True),
        # uv's cache may be on another disk than .venv
        (FULL, None, "ERROR: no such wheel", ("pip failed", "ERROR: no such wheel"), False),
        ("error: no way in", None, FULL, ("pip failed", FULL), True),
        (FULL, NO_ENSUREPIP, None, ("uv failed", FULL), True),
        ("error: no way in", "zlib is broken", None, ("uv failed", "error: no way in"), False),
    ],
)
def test_the_problem_is_of_the_last_installer(
    uv: str | None,
    ensurepip: str | None,
    pip: str | None,
    shown: tuple[str, ...],
    full: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The printed text of each program that fails; None: it succeeds or is not there."""

    def program(path: Path, code: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{code}\n")
        path.chmod(0o755)

    def fails(text: str | None) -> str:
        return "exit 0" if text is None else f"echo '{text}'; exit 1"

    monkeypatch.syspath_prepend(str(ROOT / "lib"))
    install = importlib.import_module("install")
    monkeypatch.setattr(install, "has_pip", lambda venv: False)
    monkeypatch.setattr(shutil, "which", lambda _: str(tmp_path / "bin/uv") if uv else None)
    program(tmp_path / "bin/uv", fails(uv))
    cases = f'case "$*" in *ensurepip*) {fails(ensurepip)} ;; esac; {fails(pip)}'
    program(tmp_path / ".venv/bin/python", cases)
    with (tmp_path / "lock").open("a") as lock:
        steps = install.Steps("title", tmp_path / ".venv", lock.fileno())
        problem = steps.install(tmp_path / "requirements.txt")
    assert all(text in problem for text in shown), problem
    assert (INSTALLS_ALL in problem) == (INSTALLS_ALL in shown), problem
    assert (FULL in steps.full) == full
