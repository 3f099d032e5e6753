"""The Python environment of the project.

missing [ENV]   prints what this interpreter lacks; exit 0: nothing, 3: torch is there but packages
                are missing (the next lines are commands that install them), 1: unusable
torch           prints the version of the torch that it finds
local DIR       prints why DIR is not a usable local build of PyTorch (TORCH_LOCAL_PATH); exit 1
                then
make ROOT STAMP creates ROOT/.venv from the lock file
add ROOT SECTION [FOLDER]
                installs another section of the lock file into ROOT/.venv, or the part that .venv
                lacks into FOLDER

Runs with any Python >= 3.10 before anything is installed: standard library only. Slow imports are
inside functions, since every start runs `missing` and `local`.
"""

from __future__ import annotations

import errno
import importlib.machinery
import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import install

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 10)
SYSTEM = "--system-site-packages"
OK, UNUSABLE, RESOURCES, INTERRUPTED = 0, 1, 3, 130  # see class Exit in training/core/errors.py


def msg(message_id: str, /, **values: object) -> str:
    """training.core.messages.msg, imported with the first message: most starts have none."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from training.core.messages import msg as message

    return message(message_id, **values)


def version_in(torch: Path) -> tuple[int, ...] | None:
    """The version of a torch package, read without the slow import."""
    try:
        text = (torch / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^__version__\b[^'\"\n]*['\"](\d+)\.(\d+)", text, re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None


def torch_file() -> Path | None:
    """The file of the torch that `import torch` finds."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin) if spec and spec.origin else None


def torch_version() -> tuple[int, ...] | None:
    """The version of that torch. A local build has no package metadata."""
    file = torch_file()
    return version_in(file.parent) if file else None


def full_torch_version() -> str:
    """With the build (+cpu, +cu130); '' without torch."""
    sys.path.insert(0, str(ROOT))
    from training.host import torch_build

    build = torch_build.installed()
    return build.version if build else ""


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def missing(environment: str) -> tuple[int, str]:
    sys.path.insert(0, str(ROOT))
    from training.host import packages, torch_build

    out = []
    if sys.version_info < OLDEST_PYTHON:
        out.append(
            msg(
                "lib.environment.python_too_old",
                found=dotted(sys.version_info[:2]),
                oldest=dotted(OLDEST_PYTHON),
            )
        )
    version, oldest = torch_version(), dotted(torch_build.OLDEST)
    if version is None or version < torch_build.OLDEST:
        out.append(
            msg("lib.environment.no_torch", oldest=oldest)
            if version is None
            else msg("lib.environment.torch_too_old", found=dotted(version), oldest=oldest)
        )
    lacks = packages.lacking(name for name in packages.REQUIRED if name != "torch")
    if not out and not lacks:
        return OK, ""
    text = msg("lib.environment.comma").join(
        [*out, *(msg("lib.environment.no_package", name=name) for name in lacks)]
    )
    installed = "DUET_PYTHON" in os.environ  # an installed Duet creates no .venv
    if out and not installed:
        return UNUSABLE, text
    lacks += ["torch"] if version is None or version < torch_build.OLDEST else []
    python = f"{environment}/bin/python" if environment else sys.executable
    command = shlex.join([*packages.installer(python), *lacks])
    text += "\n" + msg("lib.environment.try", command=command)
    if not installed:
        leave = (
            "conda deactivate" if os.environ.get("CONDA_PREFIX") == environment else "deactivate"
        )
        text += "\n" + msg("lib.environment.or_leave", leave=leave)
    return RESOURCES, text


def wrong_with_local(folder: Path) -> str:
    """Why the local build of PyTorch in `folder` is unusable; '' if it is usable."""
    torch = folder / "torch"
    if not (torch / "__init__.py").is_file():
        return msg("lib.local_torch.no_package")
    if not any(
        (torch / f"_C{suffix}").exists() for suffix in importlib.machinery.EXTENSION_SUFFIXES
    ):
        built = sorted(path.name for path in torch.glob("_C.*.so"))
        return (
            msg(
                "lib.local_torch.other_python", version=dotted(sys.version_info[:2]), built=built[0]
            )
            if built
            else msg("lib.local_torch.not_built")
        )
    sys.path.insert(0, str(ROOT))
    from training.host import torch_build

    version = version_in(torch)
    if version and version < torch_build.OLDEST:
        return msg(
            "lib.local_torch.too_old", found=dotted(version), oldest=dotted(torch_build.OLDEST)
        )
    return ""


def make(root: Path, stamp: str) -> int:
    """Create .venv. The stamp is written last, so an interrupted build is repeated."""

    def build(lock: int) -> str:
        import disk_room
        import install
        import old_environment

        venv = root / ".venv"
        old_environment.settle(venv)
        if old_environment.is_made(venv, stamp):
            return ""
        if problem := old_environment.foreign_link(venv) or old_environment.in_use(venv):
            return problem
        # Child processes inherit the open file `lock`, so it stays locked while they run. The
        # module venv does not accept a link.
        steps = install.Steps(msg("lib.environment.creating"), venv.resolve(), lock)
        try:
            problem = _build(root, "torch=local" not in stamp, steps)
            if not problem:
                (venv / old_environment.STAMP).write_text(stamp, encoding="utf-8")
        except OSError as error:
            if error.errno not in disk_room.FULL_ERRORS:
                raise
            (venv / old_environment.STAMP).unlink(missing_ok=True)
            problem = steps.full = steps.full or f"    │ {error}"
        finally:
            old_environment.settle(venv)
        return disk_room.full(venv, steps.full) if problem and steps.full else problem

    return _locked(root, msg("lib.environment.not_created"), build)


def add(root: Path, section: str, folder: Path | None) -> int:
    """Install another section of the lock file, unless it is already installed."""

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
            # everything else comes from .venv, which is not changed
            options = [
                "--no-deps",
                f"--target={folder}",
            ]
        chosen = venv / f"requirements-{section}.txt"
        chosen.write_text(pins, encoding="utf-8")
        steps = install.Steps(msg("lib.environment.installing", section=section), venv, lock)
        problem = steps.install(chosen, *options)
        if not problem:
            stamp.write_text(pins, encoding="utf-8")
            log.success(
                msg(
                    "lib.environment.installed",
                    section=section,
                    folder=folder or venv,
                    seconds=steps.seconds(),
                )
            )
        return problem

    return _locked(root, msg("lib.environment.not_installed", section=section), fill)


def _locked(root: Path, failure: str, work: Callable[[int], str]) -> int:
    """Run `work`, which returns its problem, under the lock of .venv; returns the exit status."""
    sys.path.insert(0, str(root))
    from training.core import file_lock, log
    from training.core.project import NOT_WRITABLE
    from training.host.process import die_with_parent

    die_with_parent()
    try:
        with file_lock.opened(root / ".venv.lock") as lock:
            _lock(lock)
            problem = work(lock.fileno())
    except OSError as error:
        problem = _not_writable(root, error) if error.errno in NOT_WRITABLE else str(error)
    except KeyboardInterrupt:
        log.error(msg("lib.environment.interrupted", code=INTERRUPTED))
        return INTERRUPTED
    if problem:
        what, newline, more = problem.partition("\n")
        first = msg("lib.environment.failure", failure=failure, what=what, code=RESOURCES)
        log.error(f"{first}{newline}{more}")
    return RESOURCES if problem else OK


def _lock(lock: IO[str]) -> None:
    """Where the file system has locks. Two first runs at once: the second waits for the first."""
    from training.core import file_lock, log

    try:
        file_lock.take(lock, lambda: log.info(msg("lib.environment.waiting")))
    except OSError as error:
        if error.errno != file_lock.READ_ONLY:
            raise
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), lock.name) from None


def _not_writable(root: Path, error: OSError) -> str:
    from training.core import project

    return msg(
        "lib.environment.not_writable",
        path=error.filename or root,
        error=error.strerror,
        command=project.own_copy(root.resolve()),
    )


def _build(root: Path, with_torch: bool, steps: install.Steps) -> str:
    """Create and fill .venv; returns the problem or ''."""
    import disk_room
    import install
    import old_environment

    from training.core import log
    from training.host import packages, torch_build

    wanted = packages.locked("run")  # may fail: before the old environment is cleared
    venv = steps.venv
    options: list[str] = []
    version = torch_version() if with_torch else None
    if version and version >= torch_build.OLDEST and sys.prefix == sys.base_prefix:
        log.info(
            msg("lib.environment.system_torch", version=dotted(version), python=sys.executable)
        )
        with_torch, options = False, [SYSTEM]
    if with_torch and (problem := disk_room.too_small(venv)):
        return problem

    python = _outside(root / ".venv")
    if not with_torch or disk_room.free(venv)[1] >= disk_room.needed():
        old_environment.move(root / ".venv")
    (venv / old_environment.STAMP).unlink(missing_ok=True)
    # --clear empties the folder instead of removing it: .venv may link to another disk.
    # --without-pip: the packages need none where uv, or the pip of another Python, installs them.
    make = [python, "-I", "-m", "venv", "--clear", "--without-pip", *options, str(venv)]
    if steps.run("python -m venv", make):
        return msg("lib.environment.venv_failed", output=steps.excerpt())
    (venv / old_environment.HOME).write_text(str(root), encoding="utf-8")
    chosen = venv / "requirements.txt"
    chosen.write_text(
        "".join(f"{line}\n" for line in wanted if with_torch or not line.startswith("torch==")),
        encoding="utf-8",
    )
    if problem := steps.install(chosen):
        return problem
    steps.compile()
    files = install.essential(venv)
    if options[:1] == [SYSTEM] and (torch := torch_file()):  # gone outside of this container
        files.append(os.path.relpath(torch, venv))
    (venv / old_environment.FILES).write_text(
        "".join(f"{name}\n" for name in files), encoding="utf-8"
    )
    log.success(msg("lib.environment.ready", folder=root / ".venv", seconds=steps.seconds()))
    return ""


def _outside(venv: Path) -> str:
    """This Python, by a path that stays if it is that of the old environment, which is active."""
    own = os.path.realpath(sys.prefix) == os.path.realpath(venv)
    return str(getattr(sys, "_base_executable", sys.executable)) if own else sys.executable


def main(argv: list[str]) -> int:
    if argv[0] == "make":
        return make(Path(argv[1]), argv[2])
    if argv[0] == "add":
        return add(Path(argv[1]), argv[2], Path(argv[3]).resolve() if argv[3:] else None)
    if argv[0] == "local":
        text = wrong_with_local(Path(argv[1]))
        code = UNUSABLE if text else OK
    elif argv[0] == "torch":
        code, text = OK, full_torch_version()
    else:
        code, text = missing("".join(argv[1:2]))
    if text:
        print(text)
    return code


if __name__ == "__main__":
    if getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH leaves out the folder of this file
        sys.path.insert(0, str(ROOT / "lib"))
    sys.exit(main(sys.argv[1:]))
