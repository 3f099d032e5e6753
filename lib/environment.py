"""The Python environment of the project.

missing         says what the running interpreter lacks, exit 1 when it lacks something
local DIR       says what is wrong with DIR as an own build of PyTorch (TORCH_LOCAL_PATH), exit 1 when something is
make ROOT STAMP builds ROOT/.venv from the lock file

Runs with any Python >= 3.10 before anything is installed: standard library only, and not part of the package. What is
slow to import is imported where it is used: the shell asks `missing` and `local` at every start.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import sys
from pathlib import Path

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 9)
STAMP = "duet.stamp"  # in .venv, written last: what it was made from (see python::_stamp)
HOME = "duet.home"  # in .venv: the project it was made for
OK, RESOURCES, INTERRUPTED = 0, 3, 130  # see class Exit in training/errors.py


def version_in(torch: Path) -> tuple[int, ...] | None:
    """The version that a torch package says of itself; found without importing it (that takes seconds)."""
    try:
        text = (torch / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^__version__\b[^'\"\n]*['\"](\d+)\.(\d+)", text, re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None


def torch_version() -> tuple[int, ...] | None:
    """The version of the torch that `import torch` would take. An own build has no package metadata beside it."""
    spec = importlib.util.find_spec("torch")
    return version_in(Path(spec.origin).parent) if spec and spec.origin else None


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def direct_requirements(root: Path) -> list[str]:
    """Names of requirements.in."""
    lines = (root / "requirements.in").read_text(encoding="utf-8").splitlines()
    return [re.split(r"[=<>~! ;#]", line, maxsplit=1)[0] for line in lines if line and not line.startswith("#")]


def missing(root: Path) -> list[str]:
    from importlib import metadata

    out = []
    if sys.version_info < OLDEST_PYTHON:
        out.append(f"Python {dotted(sys.version_info[:2])} ({dotted(OLDEST_PYTHON)} or newer is needed)")
    version = torch_version()
    if version is None or version < OLDEST_TORCH:
        found = "no torch" if version is None else f"torch {dotted(version)}"
        out.append(f"{found} ({dotted(OLDEST_TORCH)} or newer is needed)")
    for name in direct_requirements(root):
        try:
            if name != "torch":
                metadata.version(name)
        except metadata.PackageNotFoundError:
            out.append(f"no {name}")
    return out


def wrong_with_local(folder: Path) -> str:
    """Why an own build of PyTorch in `folder` can not be used; empty when it can."""
    torch = folder / "torch"
    if not (torch / "__init__.py").is_file():
        return "there is no torch/__init__.py below it"
    if not any((torch / f"_C{suffix}").exists() for suffix in importlib.machinery.EXTENSION_SUFFIXES):
        built = sorted(path.name for path in torch.glob("_C.*.so"))
        return f"torch is built for another Python than {dotted(sys.version_info[:2])}: {built[0]}" if built else "torch is not built there"
    version = version_in(torch)
    if version and version < OLDEST_TORCH:
        return f"torch {dotted(version)} is too old, {dotted(OLDEST_TORCH)} or newer is needed"
    return ""


def make(root: Path, stamp: str) -> int:
    """Build .venv. The stamp is written last: an interrupted build is done again."""
    import fcntl

    sys.path.insert(0, str(root))
    from training import console
    from training.host.process import die_with_parent

    die_with_parent()
    try:
        with open(root / ".venv.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # two first runs at once: the second waits and finds it done
                console.info("waiting: another run is making the environment")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_made(root / ".venv", stamp):
                return OK
            problem = _not_ours(root / ".venv") or _build(root, "torch=local" not in stamp, lock.fileno())
            if not problem:
                (root / ".venv" / STAMP).write_text(stamp, encoding="utf-8")
    except OSError as error:
        problem = str(error)
    except KeyboardInterrupt:
        console.error(f"interrupted while making the environment (exit {INTERRUPTED}); the next run begins it again")
        return INTERRUPTED
    if problem:
        console.error(f"the environment could not be made: {problem} (exit {RESOURCES})")
    return RESOURCES if problem else OK


def _is_made(venv: Path, stamp: str) -> bool:
    """The same question as at the end of python::find, asked again by the one that has waited."""
    python, stamp_file = (venv / "bin/python").resolve(), venv / STAMP
    packages = venv / "lib" / python.name if python.name.startswith("python3.") else venv
    return python.is_file() and packages.is_dir() and stamp_file.is_file() and stamp_file.read_text(encoding="utf-8") == stamp


def _not_ours(venv: Path) -> str:
    """Through a symbolic link (to a larger disk) only our own or an empty folder is filled: others may use it."""
    if not venv.is_symlink() or not venv.exists() or not any(venv.iterdir()):
        return ""
    home = venv / HOME
    if home.is_file() and home.read_text(encoding="utf-8") == str(venv.parent):
        return ""
    return f"{venv} is a link to {venv.resolve()}, which was not made for this project: remove the link, or empty that folder"


def _build(root: Path, with_torch: bool, lock: int) -> str:
    """Make and fill .venv; the problem if there is one. The open file `lock` stays locked as long as pip lives."""
    import functools
    import subprocess

    from training import console
    from training.host.process import die_with_parent

    # What can fail easily comes before the old environment goes.
    wanted = (root / "requirements.lock").read_text(encoding="utf-8").splitlines()
    venv = (root / ".venv").resolve()  # the module venv takes no link
    options: list[str] = []
    version = torch_version() if with_torch else None
    if version and version >= OLDEST_TORCH and sys.prefix == sys.base_prefix:
        console.info(f"torch {dotted(version)} of {sys.executable} is used (system site packages)")
        with_torch, options = False, ["--system-site-packages"]
    # The pip of this Python fills the new environment: twice as fast as to install a pip there first. Started by its
    # runner, not by `pip --python`, which older pips lack and which starts a grandchild that would outlive a killed pip.
    spec = importlib.util.find_spec("pip")
    runner = Path(spec.origin).with_name("__pip-runner__.py") if spec and spec.origin else None
    outer = runner is not None and runner.is_file()
    pip = [str(venv / "bin/python"), *([str(runner)] if outer else ["-m", "pip"])]
    options += ["--without-pip"] if outer else []

    run = functools.partial(
        subprocess.run,
        stdout=sys.stderr,
        check=False,
        pass_fds=[lock],
        preexec_fn=functools.partial(die_with_parent, os.getpid()),  # one thread: safe
    )
    (venv / STAMP).unlink(missing_ok=True)
    # --clear empties the folder instead of removing it: .venv may be a link to one on a larger disk.
    if run([sys.executable, "-m", "venv", "--clear", *options, str(venv)]).returncode:
        return "`python3 -m venv` failed (try: apt-get install python3-venv)"
    (venv / HOME).write_text(str(root), encoding="utf-8")
    chosen = venv / "requirements.txt"
    chosen.write_text("".join(f"{line}\n" for line in wanted if with_torch or not line.startswith("torch==")), encoding="utf-8")
    env = os.environ | {"PIP_REQUIRE_VIRTUALENV": "0", "PIP_USER": "0", "PYTHONUNBUFFERED": "1"}
    bar = "on" if sys.stderr.isatty() else "off"
    install = [*pip, "install", "--no-compile", "--disable-pip-version-check", "--progress-bar", bar, "-r", str(chosen)]
    if run(install, env=env).returncode:
        return "pip failed, see its message above; the same command again begins it again"
    # pip compiles with one core; all of them take seconds. Without it, and where PYTHONDONTWRITEBYTECODE is set (many
    # containers), each start would compile torch again: 4 s. Some packages hold files that are no Python: no error.
    console.info("compiling the packages")
    site = [sys.executable, "-m", "compileall", "-q", "-j", "0", *map(str, venv.glob("lib/python3.*/site-packages"))]
    run(site, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return ""


def main(argv: list[str]) -> int:
    if argv[0] == "make":
        return make(Path(argv[1]), argv[2])
    root = Path(__file__).resolve().parent.parent
    text = wrong_with_local(Path(argv[1])) if argv[0] == "local" else ", ".join(missing(root))
    if text:
        print(text)
    return bool(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
