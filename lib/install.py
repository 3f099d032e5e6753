"""Installs packages into an environment for lib/environment.py, with uv if available, else pip.

One line shows the progress; the output of the programs goes to a file. Standard library only.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import disk_room

from training.core import log as console
from training.core import redact
from training.core.cells import cells
from training.core.messages import msg
from training.core.project import ROOT
from training.host import package_sources
from training.host.process import die_with_parent

LOG = "install.log"  # in .venv
POLL_S, LOG_EVERY_S = 0.3, 15.0
SHOWN_LINES = 6
KILLED = 128  # exit statuses above are 128 + signal
UV_QUIET = ("--no-progress", "--color=never")
PIP_QUIET = ("--no-compile", "--disable-pip-version-check", "--progress-bar=off")
# Debian's Python without python3-venv, and the one that its python3-venv belongs to
NO_ENSUREPIP = re.compile("No module named ensurepip|ensurepip is disabled")
# Imports of a training start, in two parts of equal work; importing compiles to bytecode.
IMPORTS = (
    (
        "torch",
        "torch.distributed",
        "torch.nn.parallel",
        "torch._dynamo",
        "torch.utils.tensorboard",
        "tqdm",
        "pynvml",
        "psutil",
    ),
    (
        "sympy",
        "numpy",
        "wandb",
        "tensorboard",
        "PIL.Image",
        "mpmath",
        "opentelemetry.sdk.trace",
        "requests",
        "networkx",
    ),
)
_IMPORT = """import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException:
        pass
"""


class Steps:
    """The steps of one installation. `title`: prefix of the progress line. Child processes inherit
    the open file `lock`, so it stays locked while they run. `full`: what the program of the problem
    printed if it found no space on the disk."""

    full = ""

    def __init__(self, title: str, venv: Path, lock: int) -> None:
        self.title, self.venv, self.lock, self._output, self._part = (
            title,
            venv,
            lock,
            "",
            venv / "tmp",
        )
        self._begin = self._logged = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def run(
        self,
        what: str,
        *commands: Sequence[str],
        env: Mapping[str, str] | None = None,
        detail: Callable[[str], str] | None = None,
    ) -> int:
        """Run programs in parallel; returns the highest exit status. `detail`: progress text from
        their output."""
        begin = time.monotonic()
        with tempfile.TemporaryFile() as output:
            running = [self._start(command, output, env) for command in commands]
            try:
                while any(program.poll() is None for program in running):
                    self._show(what if detail is None else detail(self._read(output)) or what)
                    time.sleep(POLL_S)
            except BaseException:
                for program in running:
                    program.kill()
                    program.wait()
                raise
            finally:
                if sys.stderr.isatty():
                    sys.stderr.write("\r\x1b[K")
                self._output = self._read(output)
        if self.venv.is_dir():
            self._record(what, time.monotonic() - begin)
        status = max(
            (
                status if status >= 0 else KILLED - status
                for status in (program.returncode for program in running)
            ),
            default=0,
        )
        self.full = self.excerpt() if status and disk_room.FULL.search(self._output) else ""
        return status

    def _record(self, what: str, seconds: float) -> None:
        """Append the output to the log. On a full disk there is none: a part of it explains
        nothing."""
        lines = (f"# {what}", *self._output.splitlines(), f"# {seconds:.1f} s")
        try:
            with (self.venv / LOG).open("a", encoding="utf-8") as log:
                log.writelines(f"{line}\n" for line in lines)
        except OSError:
            (self.venv / LOG).unlink(missing_ok=True)

    def _show(self, state: str) -> None:
        """The progress line: redrawn on a terminal, logged every LOG_EVERY_S elsewhere."""
        text = f"{self.title}: {state}, {self.seconds():.0f} s"
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns - 1
            while text and cells(text) > width:
                text = text[:-1]
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
        elif time.monotonic() - self._logged >= LOG_EVERY_S:
            self._logged = time.monotonic()
            console.info(text)

    def _start(
        self, command: Sequence[str], output: IO[bytes], env: Mapping[str, str] | None
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            pass_fds=[self.lock],
            preexec_fn=functools.partial(die_with_parent, os.getpid()),  # noqa: PLW1509 – one thread: safe
        )

    def _read(self, output: IO[bytes]) -> str:
        """The whole output, without moving the file position of the programs."""
        size = os.fstat(output.fileno()).st_size
        text = os.pread(output.fileno(), size, 0).decode("utf-8", "replace")
        return redact.LOGIN_IN_ADDRESS.sub("://…@", text)

    def excerpt(self) -> str:
        """The last lines of the output for an error message, and the path of the full log."""
        lines = [line for line in self._output.splitlines() if line.strip()]
        wanted = [line for line in lines if _tells_why(line)] or lines
        where = (
            [msg("lib.install.full_log", path=self.venv / LOG)]
            if (self.venv / LOG).is_file()
            else []
        )
        return "\n".join([*(f"    │ {line[:200]}" for line in wanted[-SHOWN_LINES:]), *where])

    def install(self, requirements: Path, *options: str) -> str:
        """Install these into the environment; returns the problem or ''."""
        # beside the packages: /tmp may be too small
        self._part.mkdir(exist_ok=True)
        env = {name: value for name, value in os.environ.items() if name != "UV_CONSTRAINT"} | {
            "PIP_CONSTRAINT": os.devnull,  # the lock decides; an image may pin other versions
            "PIP_REQUIRE_VIRTUALENV": "0",
            "PIP_USER": "0",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self._part),
        }
        words, python = ["-r", str(requirements), *options], str(self.venv / "bin/python")
        status, problem = 1, ""
        if uv := shutil.which("uv"):
            sources, closed = package_sources.uv_sources(env)
            # not the settings of a project in the current folder, which may replace pinned versions
            places = ["--project", str(ROOT), "--python", python]
            command = [uv, "pip", "install", *places, *closed, *words]
            shown = ["env", *(f"{name}={value}" for name, value in sources.items())]
            status, problem = self._packages(
                "uv", command, UV_QUIET, env | sources, shown if sources else []
            )
        # pip also as a fallback: its settings may hold a proxy or password that uv does not know
        if 0 < status <= KILLED:
            full_for_uv = self.full
            ensure = [python, "-I", "-m", "ensurepip", "--default-pip"]
            if has_pip(self.venv) or not self.run("python -m ensurepip", ensure, env=env):
                command = [*pip(self.venv), "install", *words]
                _, problem = self._packages("pip", command, PIP_QUIET, env)
            elif uv:  # the problem remains that of uv
                self.full = self.full or full_for_uv
            elif NO_ENSUREPIP.search(self._output):
                problem = msg("lib.environment.no_pip", output=self.excerpt())
            else:
                problem = self._failed("python -m ensurepip", ensure)
        shutil.rmtree(self._part, ignore_errors=True)
        return problem

    def _packages(
        self,
        name: str,
        command: Sequence[str],
        quiet: Sequence[str],
        env: Mapping[str, str],
        shown: Sequence[str] = (),
    ) -> tuple[int, str]:
        """The exit status, and the problem or ''. `shown`: precedes the command to try."""
        what = msg("lib.install.packages", name=name)
        status = self.run(what, [*command, *quiet], env=env, detail=self._how_far)
        if not status:
            return 0, ""
        return status, self._failed(name, [*shown, *command])

    def _failed(self, name: str, command: Sequence[str]) -> str:
        again = redact.joined(command)
        return msg("lib.install.failed", name=name, output=self.excerpt(), command=again)

    def _how_far(self, printed: str) -> str:
        """Progress from the output of pip or uv."""
        if found := re.search(r"^Installing collected packages: (.*)$", printed, re.MULTILINE):
            names = found[1].split(", ")
            done = len(list(self.venv.glob("lib/python3.*/site-packages/*.dist-info/INSTALLER")))
            return msg(
                "lib.install.copying",
                package=names[min(done, len(names) - 1)],
                done=min(done + 1, len(names)),
                total=len(names),
            )
        # uv reports large packages only
        loading = re.findall(r"^Downloading (\S+) \(", printed, re.MULTILINE)
        if under_way := [
            name
            for name in loading
            if not re.search(rf"^\s*Downloaded {re.escape(name)}$", printed, re.MULTILINE)
        ]:
            done, shown = len(loading) - len(under_way), ", ".join(under_way[:3])
            return msg("lib.install.fetching_large", packages=shown, done=done, total=len(loading))
        collected = re.findall(r"^(?:Collecting|Processing) (\S+)", printed, re.MULTILINE)
        if not collected:
            return ""
        # unlike rglob, os.walk tolerates folders that pip removes meanwhile
        loaded = sum(
            _size(Path(folder, name)) for folder, _, names in os.walk(self._part) for name in names
        )
        name, count, megabytes = collected[-1].rpartition("/")[2], len(collected), loaded >> 20
        if megabytes:
            return msg("lib.install.fetching_size", name=name, count=count, megabytes=megabytes)
        return msg("lib.install.fetching", name=name, count=count)

    def compile(self) -> None:
        """Compile what a start imports, a third of all; the rest compiles at first import. Without
        this, every start would compile torch where PYTHONDONTWRITEBYTECODE is set (many
        containers). A failed import is ignored here; a start reports it."""
        env = {
            name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
        }
        python = [str(self.venv / "bin/python"), "-I", "-c", _IMPORT]
        self.run(msg("lib.install.compiling"), *([*python, *names] for names in IMPORTS), env=env)


def _tells_why(line: str) -> bool:
    return line.startswith(("ERROR", "error")) or bool(disk_room.FULL.search(line))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # removed by pip meanwhile
        return 0


def outer_pip() -> Path | None:
    """The runner with which this Python's pip installs into another environment: twice as fast as
    installing pip there first. Not `pip --python`: older pips lack it, and its child process would
    outlive a killed pip."""
    spec = importlib.util.find_spec("pip")
    runner = Path(spec.origin).with_name("__pip-runner__.py") if spec and spec.origin else None
    return runner if runner and runner.is_file() else None


def pip(venv: Path) -> list[str]:
    """The pip command that installs into this environment; no module of the current folder hides
    one of Python's."""
    runner = outer_pip()
    return [str(venv / "bin/python"), *([str(runner)] if runner else ["-I", "-u", "-m", "pip"])]


def has_pip(venv: Path) -> bool:
    return outer_pip() is not None or any(venv.glob("lib/python3.*/site-packages/pip/__main__.py"))


def essential(venv: Path) -> list[str]:
    """Files that must exist in an intact environment, relative to it: the __init__.py of every
    package, top-level modules and compiled libraries."""
    site = next(venv.glob("lib/python3.*/site-packages"), None)
    found = [venv / "pyvenv.cfg"]
    for folder, _, names in os.walk(site) if site else ():
        top = Path(folder) == site
        found += [
            Path(folder, n)
            for n in names
            if n == "__init__.py" or ".so" in n or (top and n.endswith(".py"))
        ]
    return sorted(
        str(file.relative_to(venv))
        for file in found
        if file.stat().st_size and "\n" not in str(file)
    )
