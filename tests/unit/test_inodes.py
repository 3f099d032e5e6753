"""A disk that takes no more files, but has room for bytes: the usual quota of a cluster."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.test_engine_saver import log, saver
from tests.unit.test_verdict_card import run
from tests.unit.verdicts import failed, report_error
from training.core.errors import unwritable
from training.core.rundir import RunDir
from training.trainer.async_checkpoint import AsyncCheckpointer

__all__ = ["log", "run", "saver"]  # fixtures


@pytest.mark.parametrize(("files", "left", "full"), [(99, 2, True), (99, 50, False), (0, 0, False)])
def test_a_disk_without_inodes_may_have_much_free_space(
    files: int, left: int, *, full: bool, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """btrfs counts no files."""
    facts = SimpleNamespace(f_files=files, f_favail=left)
    monkeypatch.setattr(os, "statvfs", lambda _: facts)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40))
    report_error(run, 1, "OSError", "[Errno 28] No space left on device", disk_full=True)
    text = "\n".join(failed(run)["advice"])
    assert ("takes no more of them (df -i)" in text, "MB free" in text) == (full, not full)


def test_a_disk_without_inodes_has_room_for_no_checkpoint(
    tmp_path: Path, saver: AsyncCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = SimpleNamespace(f_files=99, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda _: facts)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert saver._room(full) == f"; the disk of {tmp_path} takes no more files"


def test_a_file_that_cannot_be_written_has_commands_that_show_why() -> None:
    full, denied = (OSError(number, os.strerror(number)) for number in (errno.EDQUOT, errno.EACCES))
    assert unwritable("/a b", full).problems[0].fixes == ["df -h '/a b'; df -i '/a b'; quota -s"]
    assert not unwritable("/a b", denied).problems[0].fixes
