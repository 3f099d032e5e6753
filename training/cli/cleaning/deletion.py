"""Deletion: renamed first, so that what is deleted is gone completely or not at all. What cannot be
deleted at all has its name again."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

from training.cli.cleaning import selection
from training.cli.cleaning.options import CHECKPOINTS, RUNS, CleanOptions
from training.cli.cleaning.selection import TRASH, Item, Selection
from training.core import manifest
from training.core.messages import msg
from training.monitor.runs import facts


def delete(chosen: Selection, options: CleanOptions) -> tuple[list[Item], list[tuple[Path, str]]]:
    """(what was deleted, what was not and why). Each run is looked at again right before."""
    done: list[Item] = []
    failed: list[tuple[Path, str]] = []
    intact: dict[Path, bool] = {}
    for item in chosen.items:
        if not os.path.lexists(item.path):  # another cleaning was first
            continue
        reason = _refused(item, options, intact)
        if not reason:
            try:
                _remove(item)
            except FileNotFoundError:
                continue
            except OSError as error:
                reason = error.strerror or str(error)
        if reason:
            failed.append((item.path, reason))
        else:
            done.append(item)
    return done, failed


def _refused(item: Item, options: CleanOptions, intact: dict[Path, bool]) -> str:
    """Why an item stays; "" if it goes."""
    if not selection.inside(item.path, options.dir):
        return msg("cli.clean.link")
    if item.path.name.startswith(TRASH) and item.path.parent == options.dir:
        return ""
    # last, since the weights take minutes to read
    return _needed(item, intact) or selection.untouchable(facts.read(item.run.path))


def _needed(item: Item, intact: dict[Path, bool]) -> str:
    """Older checkpoints are the reserve of the newest one: it must be readable to the last byte."""
    for checkpoint in item.verified:
        if checkpoint not in intact:
            intact[checkpoint] = selection.is_intact(checkpoint)
        if intact[checkpoint]:
            return msg("cli.clean.only_intact") if checkpoint == item.path else ""
    return msg("cli.clean.no_intact") if item.verified else ""


def _remove(item: Item) -> None:
    """Raises OSError."""
    path = item.path
    if item.kind == "trash":
        _erase(path)
        return
    if not path.is_dir():
        path.unlink()
        return
    # The next cleaning removes what it finds under these prefixes, as does the trainer.
    prefix = manifest.TEMPORARY if item.kind == CHECKPOINTS else TRASH
    name = f"{prefix}{path.name}" + (f"-{os.getpid()}" if item.kind == RUNS else "")
    work = path.with_name(name)
    if work.exists():
        _erase(work)
    there = _entries(path)
    path.rename(work)
    try:
        _erase(work)
    except OSError:
        if _entries(work) == there:
            with contextlib.suppress(OSError):
                work.rename(path)
        raise


def _entries(folder: Path) -> int:
    return sum(len(folders) + len(files) for _, folders, files in os.walk(folder))


def _erase(path: Path) -> None:
    """Also with read-only folders in it, such as those of a package cache. Raises OSError; what is
    left keeps its permissions."""
    try:
        shutil.rmtree(path)
    except PermissionError:
        before: dict[Path, int] = {}
        try:
            _open(path, before)
            for folder, folders, _ in os.walk(path):
                for inner in (Path(folder, name) for name in folders):
                    if not inner.is_symlink():
                        _open(inner, before)
            shutil.rmtree(path)
        except OSError:
            for opened, mode in reversed(before.items()):  # the inner ones first
                with contextlib.suppress(OSError):
                    opened.chmod(mode)
            raise


def _open(folder: Path, before: dict[Path, int]) -> None:
    """Give its owner all rights. `before`: gets its mode, if that was another. Raises OSError."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        folder.chmod(mode | stat.S_IRWXU)
        before[folder] = mode
