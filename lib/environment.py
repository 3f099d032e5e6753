"""The Python environment of the project.

missing [ENV]   prints what the running interpreter lacks; exit 0: nothing, 3: only small packages
                beside its torch (the next lines are commands that help), 1: it cannot be used
local DIR       prints what is wrong with DIR as an own build of PyTorch (TORCH_LOCAL_PATH), exit 1
                when something is
make ROOT STAMP builds ROOT/.venv from the lock file
add ROOT SECTION [FOLDER]
                installs a later section of the lock file into ROOT/.venv, or into FOLDER what .venv
                lacks of it

Runs with any Python >= 3.10 before anything is installed: standard library only, and not part of
the package. What is slow to import is imported where it is used: the shell asks `missing` and
`local` at every start.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 9)
STAMP = "duet.stamp"  # in .venv, written last: what it was made from (see venv::_stamp)
HOME = "duet.home"  # in .venv: the project it was made for
FILES = "duet.files"  # in .venv: what must be there and not empty (see venv::is_whole)
OK, UNUSABLE, RESOURCES, INTERRUPTED = 0, 1, 3, 130  # see class Exit in training/core/errors.py


def version_in(torch: Path) -> tuple[int, ...] | None:
    """The version that a torch package says of itself; found without importing it (that takes
    seconds)."""
    try:
        text = (torch / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^__version__\b[^'\"\n]*['\"](\d+)\.(\d+)", text, re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None


def torch_version() -> tuple[int, ...] | None:
    """The version of the torch that `import torch` would take. An own build has no package metadata
    beside it."""
    spec = importlib.util.find_spec("torch")
    return version_in(Path(spec.origin).parent) if spec and spec.origin else None


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def missing(environment: str) -> tuple[int, str]:
    sys.path.insert(0, str(ROOT))
    from training.host import packages

    out = []
    if sys.version_info < OLDEST_PYTHON:
        out.append(
            f"Python {dotted(sys.version_info[:2])} ({dotted(OLDEST_PYTHON)} or newer is needed)"
        )
    version = torch_version()
    if version is None or version < OLDEST_TORCH:
        found = "no torch" if version is None else f"torch {dotted(version)}"
        out.append(f"{found} ({dotted(OLDEST_TORCH)} or newer is needed)")
    lacks = packages.lacking(name for name in packages.REQUIRED if name != "torch")
    text = ", ".join([*out, *(f"no {name}" for name in lacks)])
    installed = "DUET_PYTHON" in os.environ  # such a Duet makes no .venv
    if not text or (out and not installed):
        return UNUSABLE if text else OK, text
    lacks += ["torch"] if version is None or version < OLDEST_TORCH else []
    python = shlex.join(
        [
            f"{environment}/bin/python" if environment else sys.executable,
            "-m",
            "pip",
            "install",
            *lacks,
        ]
    )
    text += f"\n    try:     {python}"
    if not installed:
        leave = (
            "conda deactivate" if os.environ.get("CONDA_PREFIX") == environment else "deactivate"
        )
        text += (
            f"\n    or:      {leave}   # then the first start makes .venv, with a torch of its own"
        )
    return RESOURCES, text


def wrong_with_local(folder: Path) -> str:
    """Why an own build of PyTorch in `folder` can not be used; empty when it can."""
    torch = folder / "torch"
    if not (torch / "__init__.py").is_file():
        return "there is no torch/__init__.py below it"
    if not any(
        (torch / f"_C{suffix}").exists() for suffix in importlib.machinery.EXTENSION_SUFFIXES
    ):
        built = sorted(path.name for path in torch.glob("_C.*.so"))
        return (
            f"torch is built for another Python than {dotted(sys.version_info[:2])}: {built[0]}"
            if built
            else "torch is not built there"
        )
    version = version_in(torch)
    if version and version < OLDEST_TORCH:
        return f"torch {dotted(version)} is too old, {dotted(OLDEST_TORCH)} or newer is needed"
    return ""


def make(root: Path, stamp: str) -> int:
    """Build .venv. The stamp is written last: an interrupted build is done again."""

    def build(lock: int) -> str:
        venv = root / ".venv"
        if _is_made(venv, stamp):
            return ""
        problem = _not_ours(venv) or _build(root, "torch=local" not in stamp, lock)
        if not problem:
            (venv / STAMP).write_text(stamp, encoding="utf-8")
        return problem

    return _alone(root, "the environment could not be made", build)


def add(root: Path, section: str, folder: Path | None) -> int:
    """Install a later section of the lock file; free when it is there already."""

    def fill(lock: int) -> str:
        import install

        from training.core import log
        from training.host import packages

        venv = (root / ".venv").resolve()
        pins = "".join(f"{line}\n" for line in packages.locked(section))
        stamp = (folder or venv) / f"{section}.stamp"
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == pins:
            return ""
        options = []
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            # all else comes from .venv, which stays as it is
            options = [
                "--no-deps",
                f"--target={folder}",
            ]
        chosen = venv / f"requirements-{section}.txt"
        chosen.write_text(pins, encoding="utf-8")
        steps = install.Steps(f"installing [{section}] of requirements.lock", venv, lock)
        problem = steps.install(chosen, *options)
        if not problem:
            stamp.write_text(pins, encoding="utf-8")
            log.success(
                f"installed [{section}] of requirements.lock into {folder or venv} "
                f"({steps.seconds():.0f} s)"
            )
        return problem

    return _alone(root, f"[{section}] of requirements.lock could not be installed", fill)


def _alone(root: Path, failure: str, work: Callable[[int], str]) -> int:
    """Do `work`, which returns its problem, while nobody else changes .venv; the exit status."""
    import fcntl

    sys.path.insert(0, str(root))
    from training.core import log
    from training.host.process import die_with_parent

    die_with_parent()
    try:
        with _lock(root / ".venv.lock") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # two first runs at once: the second waits and finds it done
                log.info("waiting: another run is making the environment")
                fcntl.flock(lock, fcntl.LOCK_EX)
            problem = work(lock.fileno())
    except PermissionError as error:
        problem = _not_writable(root, error)
    except OSError as error:
        problem = str(error)
    except KeyboardInterrupt:
        log.error(
            f"interrupted while installing (exit {INTERRUPTED}); the next run begins it again"
        )
        return INTERRUPTED
    if problem:
        what, newline, more = problem.partition("\n")
        log.error(f"{failure}: {what} (exit {RESOURCES}){newline}{more}")
    return RESOURCES if problem else OK


def _lock(path: Path) -> IO[str]:
    """Open for its lock alone: another user's file that may only be read serves too."""
    try:
        return path.open("a")
    except PermissionError:
        if not path.exists():
            raise
        return path.open()


def _not_writable(root: Path, error: PermissionError) -> str:
    return (
        f"{error.filename or root} cannot be written by this user ({error.strerror})\n"
        "    allowed: a project folder of your own, a .venv that its owner has finished, or an "
        "active environment with torch\n"
        f"    try:     git clone {shlex.quote(str(root))} ~/{shlex.quote(root.name)}   # and start "
        f"it there"
    )


def _is_made(venv: Path, stamp: str) -> bool:
    """The same question as venv::is_current, asked again by the one that has waited."""
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


def _not_ours(venv: Path) -> str:
    """Through a symbolic link (to a larger disk) only our own or an empty folder is filled: others
    may use it."""
    if not venv.is_symlink() or not venv.exists() or not any(venv.iterdir()):
        return ""
    home = venv / HOME
    if home.is_file() and home.read_text(encoding="utf-8") == str(venv.parent):
        return ""
    return (
        f"{venv} is a link to {venv.resolve()}, which was not made for this project: remove "
        f"the "
        f"link, or empty that folder"
    )


def _build(root: Path, with_torch: bool, lock: int) -> str:
    """Make and fill .venv; the problem if there is one. The open file `lock` stays locked as long
    as a program of it lives."""
    import install

    from training.core import log
    from training.host import packages

    wanted = packages.locked("run")  # what can fail easily comes before the old environment goes
    venv = (root / ".venv").resolve()  # the module venv takes no link
    options: list[str] = []
    version = torch_version() if with_torch else None
    if version and version >= OLDEST_TORCH and sys.prefix == sys.base_prefix:
        log.info(f"torch {dotted(version)} of {sys.executable} is used (system site packages)")
        with_torch, options = False, ["--system-site-packages"]
    if shutil.which("uv") or install.outer_pip():
        options.append("--without-pip")

    (venv / STAMP).unlink(missing_ok=True)
    steps = install.Steps("making the environment .venv", venv, lock)
    # --clear empties the folder instead of removing it: .venv may be a link to one on a larger
    # disk.
    if steps.run("an empty one", [sys.executable, "-m", "venv", "--clear", *options, str(venv)]):
        return f"`python3 -m venv` failed (try: apt-get install python3-venv)\n{steps.last_words()}"
    (venv / HOME).write_text(str(root), encoding="utf-8")
    chosen = venv / "requirements.txt"
    chosen.write_text(
        "".join(f"{line}\n" for line in wanted if with_torch or not line.startswith("torch==")),
        encoding="utf-8",
    )
    if problem := steps.install(chosen):
        return problem
    steps.compile()
    (venv / FILES).write_text(
        "".join(f"{name}\n" for name in install.essential(venv)), encoding="utf-8"
    )
    log.success(f"environment ready: {root / '.venv'} ({steps.seconds():.0f} s)")
    return ""


def main(argv: list[str]) -> int:
    if argv[0] == "make":
        return make(Path(argv[1]), argv[2])
    if argv[0] == "add":
        return add(Path(argv[1]), argv[2], Path(argv[3]).resolve() if argv[3:] else None)
    if argv[0] == "local":
        text = wrong_with_local(Path(argv[1]))
        code = UNUSABLE if text else OK
    else:
        code, text = missing("".join(argv[1:2]))
    if text:
        print(text)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
