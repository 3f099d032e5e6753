"""The environment that exists when lib/environment.py creates one: whether it will do or is in use.
The old one stays in .venv.old until the new one is complete, and returns otherwise. Standard
library only."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from training.core import redact
from training.core.messages import msg
from training.host import process

STAMP = "duet.stamp"  # in .venv, written last: its sources (see venv::_stamp)
HOME = "duet.home"  # in .venv: the project it belongs to
FILES = "duet.files"  # in .venv: files that must not be missing or empty (see venv::is_whole)
OF_FAILURE = ("install.log", "requirements.txt")  # named by the message of a failed installation


def is_made(venv: Path, stamp: str) -> bool:
    """The check of venv::is_current, repeated after waiting for the lock."""
    python, stamp_file, files = (venv / "bin/python").resolve(), venv / STAMP, venv / FILES
    if (
        not python.is_file()
        or not stamp_file.is_file()
        or stamp_file.read_text(encoding="utf-8") != stamp
    ):
        return False
    packages = venv / "lib" / python.name if python.name.startswith("python3.") else venv
    names = files.read_text(encoding="utf-8").splitlines() if files.is_file() else []
    return packages.is_dir() and all(
        (venv / name).is_file() and (venv / name).stat().st_size for name in names
    )


def foreign_link(venv: Path) -> str:
    """Refuses a .venv that links to a folder in use by others; a link to an empty folder (on a
    larger disk) or to this project's environment is fine."""
    if not venv.is_symlink() or not venv.exists() or not any(venv.iterdir()):
        return ""
    home = venv / HOME
    if home.is_file() and home.read_text(encoding="utf-8") == str(venv.parent):
        return ""
    return msg("lib.environment.foreign_link", venv=venv, target=venv.resolve())


def size(venv: Path) -> int:
    """Bytes that clearing the old environment frees; files that uv shares with its cache stay."""
    found = 0
    for folder, _, names in os.walk(venv):
        for name in names:
            status = os.lstat(os.path.join(folder, name))
            found += status.st_blocks * 512 if status.st_nlink == 1 else 0
    return found


def aside(venv: Path) -> Path:
    return venv.with_name(".venv.old")


def move(venv: Path) -> None:
    """Set a complete environment aside; a link stays, since it names the disk of the new one."""
    if (venv / STAMP).is_file() and not venv.is_symlink() and not aside(venv).exists():
        # a mounted volume (EBUSY), or in a layer of an image (EXDEV): emptied in place
        with contextlib.suppress(OSError):
            venv.rename(aside(venv))


def settle(venv: Path) -> None:
    """After a creation, or before one if the last was killed: the stamp decides which stays."""
    old = aside(venv)
    if not old.is_dir():
        return
    if (venv / STAMP).is_file() or venv.is_symlink():
        (old / STAMP).unlink(missing_ok=True)  # half removed, it must not look complete
        shutil.rmtree(old, ignore_errors=True)
        return
    for name in OF_FAILURE:
        with contextlib.suppress(FileNotFoundError):
            (venv / name).replace(old / name)
    shutil.rmtree(venv, ignore_errors=True)
    old.rename(venv)


def empty(venv: Path) -> None:
    """Removes what is in it, except the files that explain the failure. A link or mounted volume
    stays."""
    for path in [path for path in venv.iterdir() if path.name not in OF_FAILURE]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


def in_use(venv: Path) -> str:
    """Refuses to replace an environment from which another process runs: it would fail at its next
    import. The programs that wait for this one may be of it (`duet sweep`, lib/host_agent.py)."""
    own = process.ancestors()
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        words = _command(pid)
        if pid not in own and _runs_from(venv / "bin", pid, words):
            shown = redact.joined(words)[:200]
            return msg("lib.environment.in_use", venv=venv, pid=pid, command=shown)
    return ""


def _command(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return [""]
    return os.fsdecode(text.rstrip(b"\0")).split("\0")


def _on_path(pid: int, name: str) -> str:
    """Where a process has found its program, as `python` in an activated environment."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # of another user, or it has ended
        return ""
    path = next((value[5:] for value in variables if value.startswith(b"PATH=")), b"")
    return (shutil.which(name, path=os.fsdecode(path)) or "") if path else ""


def _runs_from(folder: Path, pid: int, words: list[str]) -> bool:
    """By the path of its program; its executable is the Python outside of the environment."""
    place = os.path.dirname(words[0] if "/" in words[0] else _on_path(pid, words[0]))
    if not place:
        return False
    # as the process sees it: relative, or a folder of its container
    seen = Path(f"/proc/{pid}/{'root' if place[0] == '/' else 'cwd'}/{place.lstrip('/')}")
    try:
        return seen.samefile(folder)
    except PermissionError:  # of another user
        return place == str(folder)
    except (OSError, ValueError):
        return False
