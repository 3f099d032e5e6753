"""Whose a file is, with the users that a mount or a container shows (training.core.owner)."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from tests.cases import each
from training.core import mounts, owner

ME, OTHER, UNKNOWN = 4712, 4711, 4710


@each(
    ("shown", "created", "writable", "who"),
    [
        (ME, ME, True, ""),
        (OTHER, ME, True, str(OTHER)),
        (OTHER, None, False, str(OTHER)),  # in a folder that may only be read
        (OTHER, OTHER, True, ""),  # a mount that shows one user for all
        (UNKNOWN, ME, True, ""),  # a user that the container does not know
        (UNKNOWN, ME, False, str(UNKNOWN)),
        (None, ME, True, ""),  # removed meanwhile
    ],
)
def test_a_file_of_another_user(
    shown: int | None,
    created: int | None,
    writable: bool,
    who: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: ME)
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    monkeypatch.setattr(owner, "unknown", lambda: UNKNOWN)
    monkeypatch.setattr(owner, "uid", lambda path: shown)
    monkeypatch.setattr(owner, "_new_files", lambda folder: created)
    assert owner.other(tmp_path / "run") == who
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert owner.other(tmp_path / "run") == "", "root acts for all"


def test_the_user_of_new_files(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert owner.other(tmp_path / "run") == ""
    assert owner._new_files(tmp_path) == owner.uid(tmp_path / "run") == os.geteuid()
    assert owner._new_files(tmp_path / "missing") is None
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert owner.name(tmp_path / "missing") == "?"


@each(
    ("code", "kind", "writable", "who"),
    [
        (errno.ENOSPC, "cifs", True, ""),
        (errno.EDQUOT, "fuse.sshfs", True, ""),
        (errno.ENOSPC, "cifs", False, str(OTHER)),
        (errno.ENOSPC, "ext4", True, str(OTHER)),
        (errno.EROFS, "cifs", True, str(OTHER)),
    ],
)
def test_a_full_disk(
    code: int,
    kind: str,
    writable: bool,
    who: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing can be created there, and the own runs are to be deleted."""

    def full(**options: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    monkeypatch.setattr(os, "geteuid", lambda: ME)
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    monkeypatch.setattr(owner, "unknown", lambda: UNKNOWN)
    monkeypatch.setattr(owner, "uid", lambda path: OTHER)
    monkeypatch.setattr(mounts, "file_system", lambda folder: kind)
    assert owner.other(tmp_path / kind / "run") == who
