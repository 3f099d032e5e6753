"""What the ranks of a user script execute: a Python file, a folder or archive with a __main__.py, a
module, a program on PATH, or any other executable file."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import suggest
from training.core.errors import Problem
from training.core.messages import msg

if TYPE_CHECKING:
    from training.core.contracts.plan import ScriptRecord

SOURCES = (".py", ".pyc", ".pyz")
FIND_S = 10.0
ACTIVE = "DUET_ACTIVE"  # variable: the active environment, as lib/python.sh has found it
HEAD_BYTES = 256  # the kernel reads as much of a #! line


@dataclass(frozen=True)
class Script:
    """`path`: a file as typed, or with `module` the name of a module. `python`: None for a program
    that is executed directly. `installed`: a program of an environment, not of a project."""

    path: str
    args: list[str]
    python: str | None
    python_reason: str
    module: bool = False
    installed: bool = False

    def record(self) -> ScriptRecord:
        return {
            "path": self.path,
            "args": self.args,
            "python": self.python,
            "python_reason": self.python_reason,
            "module": self.module,
        }


def find(
    path: str,
    args: list[str],
    environ: Mapping[str, str],
    problems: list[Problem],
    *,
    module: bool,
    no_python: bool,
) -> Script:
    python, reason = interpreter(environ)
    if module:
        return Script(path, args, python, reason, module=True)
    typed = os.path.expanduser(path)  # noqa: PTH111 – Path.expanduser raises for an unknown user
    file = Path(typed)
    on_path = shutil.which(typed, path=environ.get("PATH")) if "/" not in typed else None
    if on_path and (no_python or not file.exists()):
        own = None if no_python else _python_of(_head(Path(on_path)))
        if own:
            return Script(on_path, args, own, msg("plan.script.own_interpreter"), installed=True)
        return Script(on_path, args, None, "", installed=True)
    if file.is_dir():
        if not (file / "__main__.py").is_file():
            what = msg("plan.script.is_folder", path=path)
            problems.append(Problem("script.file", what, msg("plan.script.allowed")))
        return Script(typed, args, python, reason)
    if not file.is_file():
        problems.append(_missing(file, path, python))
        return Script(typed, args, python, reason)
    if not os.access(file, os.R_OK):
        fix = f"chmod u+r {shlex.quote(str(file))}"
        what = msg("plan.script.unreadable", path=path)
        problems.append(Problem("script.unreadable", what, "", [fix]))
        return Script(typed, args, python, reason)
    if not no_python and (own := _beside(file)):
        return Script(typed, args, own, msg("plan.script.own_interpreter"), installed=True)
    if not no_python and _is_python(file):
        return Script(typed, args, python, reason)
    if problem := _not_executable(file, path):
        problems.append(problem)
    return Script(typed if "/" in typed else f"./{typed}", args, None, "")


def _missing(file: Path, path: str, python: str) -> Problem:
    """`python`: of the environment that would run a script; its own programs may not be on PATH."""
    beside = Path(python).with_name(path) if "/" not in path else file
    names = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
    near = [file.with_name(name) for name in suggest.suggest(file.name, names)]
    fixes = [f"--script={shlex.quote(str(f))}" for f in ([beside] if beside.is_file() else near)]
    if file.exists():
        what = msg("plan.script.not_a_file", path=path)
    elif "/" in path or file.suffix:
        what = msg("plan.script.missing", path=path)
    else:
        what = msg("plan.script.no_program", path=path)
    return Problem("script.file", what, msg("plan.script.allowed"), fixes)


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(HEAD_BYTES)
    except OSError:  # executable but unreadable
        return b""


def _interpreter_line(head: bytes) -> list[str]:
    """Its path, which ends at the first blank, and its argument; [] without a #! line."""
    line = head.partition(b"\n")[0]
    return os.fsdecode(line[2:]).split(maxsplit=1) if line.startswith(b"#!") else []


def _python_of(head: bytes) -> str | None:
    """The Python of a #! line such as that of a console script."""
    words = _interpreter_line(head)
    if words and Path(words[0]).name.startswith("python") and os.access(words[0], os.X_OK):
        return words[0]
    return None


def _beside(file: Path) -> str | None:
    """The Python of a console script in the `bin` of an environment, which need not be active."""
    own = _python_of(_head(file))
    return own if own and Path(own).parent == file.parent.absolute() else None


def _is_python(file: Path) -> bool:
    """Whether torchrun could execute it: source text, byte code or an archive. Programs in another
    language have a #! line or are binary."""
    head = _head(file)
    if file.suffix in SOURCES or zipfile.is_zipfile(file):
        return True
    if words := _interpreter_line(head):
        return any(Path(word).name.startswith("python") for word in " ".join(words).split())
    return not head.startswith(b"#!") and b"\0" not in head


def _not_executable(file: Path, path: str) -> Problem | None:
    """A file that the kernel would refuse: neither ELF nor with a #! line, without permission, or
    with a missing interpreter. A carriage return is part of the name of an interpreter."""
    head = _head(file)
    words = _interpreter_line(head)
    shown = msg("plan.script.the_script", path=path)
    if not head.startswith(b"\x7fELF") and not words:
        name, what = shlex.quote(path), msg("plan.script.no_interpreter", shown=shown)
        fixes = [msg("plan.script.add_interpreter", file=name)]
        if file.suffix in SOURCES:
            fixes = [f"./duet watch -- python {name}", f"./duet run -n 2 {name}"]
        return Problem("script.interpreter", what, msg("plan.script.allowed"), fixes)
    if words and head.partition(b"\n")[0].endswith(b"\r"):
        what = msg("plan.script.windows_lines", shown=shown)
        fix = rf"sed -i 's/\r$//' {shlex.quote(str(file))}"
        return Problem("script.interpreter", what, "", [fix])
    if words and not os.access(words[0], os.X_OK):
        interpreter = " ".join(words)
        what = msg("plan.script.interpreter_missing", shown=shown, interpreter=interpreter)
        fix = msg("plan.script.change_interpreter", file=shlex.quote(path))
        return Problem("script.interpreter", what, msg("plan.script.allowed"), [fix])
    if not os.access(file, os.X_OK):
        fix = f"chmod +x {shlex.quote(str(file))}"
        what = msg("plan.script.not_executable", path=path)
        return Problem("script.file", what, msg("plan.script.allowed"), [fix])
    return None


def interpreter(environ: Mapping[str, str]) -> tuple[str, str]:
    """The script's Python: that of the active environment, else the one on PATH if it has torch (in
    containers), else the launcher's."""
    active = environ.get(ACTIVE, "")
    path = Path(active, "bin/python")
    variable = next((n for n in ("VIRTUAL_ENV", "CONDA_PREFIX") if environ.get(n) == active), "")
    if active and variable and os.access(path, os.X_OK):
        return str(path), msg("plan.script.active_environment", variable=variable)
    chosen = {"DUET_PYTHON", "TORCH_LOCAL_PATH"} & environ.keys()  # an environment, by the user
    for name in ("python", "python3") if environ.get("PATH") and not chosen else ():
        found = shutil.which(name, path=environ["PATH"])
        if found and has_package(found, "torch"):
            return found, msg("plan.script.path_python")
    return sys.executable, msg("plan.script.launcher_python")


def has_package(python: str, name: str) -> bool:
    """Without importing it; a Python that does not run has none."""
    ask = "import sys; sys.path.pop(0); from importlib.util import find_spec; "
    ask += f"sys.exit(find_spec({name!r}) is None)"
    try:
        done = subprocess.run(
            [python, "-c", ask],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=FIND_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
