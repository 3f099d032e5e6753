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
    ("code", "mount", "writable", "who"),
    [
        (errno.ENOSPC, "vfat /dev/sdb1 rw,uid=0", True, ""),
        (errno.EDQUOT, "cifs //nas/a rw,uid=0,forceuid,gid=0", True, ""),
        (errno.EDQUOT, "cifs //nas/a rw,uid=0,noforceuid,gid=0", True, str(OTHER)),
        (errno.EDQUOT, "fuse.rclone drive: rw", True, ""),
        (errno.EDQUOT, "fuse.juicefs JuiceFS:a rw", True, str(OTHER)),  # shows the real owners
        (errno.ENOSPC, "fuse.sshfs nas:/a rw", True, str(OTHER)),  # those of the other machine
        (errno.ENOSPC, "fuseblk /dev/sdb1 rw", True, str(OTHER)),
        (errno.ENOSPC, "vfat /dev/sdb1 rw,uid=0", False, str(OTHER)),
        (errno.ENOSPC, "ext4 /dev/sdb1 rw", True, str(OTHER)),
        (errno.EROFS, "vfat /dev/sdb1 rw,uid=0", True, str(OTHER)),
    ],
)
def test_a_full_disk(
    code: int,
    mount: str,
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
    device, listed = tmp_path.stat().st_dev, tmp_path / "mountinfo"
    number = f"{os.major(device)}:{os.minor(device)}"
    listed.write_text(f"28 1 {number} / /data rw shared:1 - {mount}\n")
    monkeypatch.setattr(mounts, "MOUNTS", listed)
    owner._new_files.cache_clear()
    assert owner.other(tmp_path / "run") == who
