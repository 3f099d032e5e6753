"""Filling .venv, for lib/environment.py: what is done is shown in one line with its seconds, what programs print goes to a file.

Standard library only.
"""

from __future__ import annotations

import functools
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

from training.core import log as console
from training.host.process import die_with_parent

LOG = "install.log"  # in .venv
POLL_S, SAY_EVERY_S = 0.3, 15.0
SHOWN_LINES = 6
# What a start of a training imports, in two parts of equal work. Importing it is what compiles it.
IMPORTS = (
    ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.utils.tensorboard", "tqdm", "pynvml", "psutil"),
    ("sympy", "numpy", "wandb", "tensorboard", "PIL.Image", "mpmath", "opentelemetry.sdk.trace", "requests", "networkx"),
)
_IMPORT = """import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException:
        pass
"""


class Steps:
    """The steps of one installation into `venv`. The open file `lock` stays locked as long as a program of them lives."""

    def __init__(self, venv: Path, lock: int) -> None:
        self.venv, self.lock, self._output, self._part = venv, lock, "", venv / "tmp"

    def run(
        self, what: str, *commands: Sequence[str], env: Mapping[str, str] | None = None, detail: Callable[[str], str] | None = None
    ) -> int:
        """Run programs side by side to their ends; the highest exit status. `detail`: how far they are, from what they have printed."""
        begin = said = time.monotonic()
        with tempfile.TemporaryFile() as output:
            running = [self._start(command, output, env) for command in commands]
            try:
                console.info(what)
                while any(program.poll() is None for program in running):
                    time.sleep(POLL_S)
                    now = time.monotonic()
                    more = detail(self._read(output)) if detail else ""
                    text = f"{what}: {f'{more}, ' if more else ''}{now - begin:.0f} s"
                    if sys.stderr.isatty():
                        width = shutil.get_terminal_size().columns
                        sys.stderr.write(f"\r\x1b[K{text[: width - 1]}")
                        sys.stderr.flush()
                    elif now - said >= SAY_EVERY_S:
                        said = now
                        console.info(text)
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
            with (self.venv / LOG).open("a", encoding="utf-8") as log:
                log.writelines(f"{line}\n" for line in (f"# {what}", *self._output.splitlines(), f"# {time.monotonic() - begin:.1f} s"))
        return max((abs(program.returncode) for program in running), default=0)

    def _start(self, command: Sequence[str], output: IO[bytes], env: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
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
        """All of it, whatever place the programs write at."""
        return os.pread(output.fileno(), os.fstat(output.fileno()).st_size, 0).decode("utf-8", "replace")

    def last_words(self) -> str:
        """What the last programs have printed of their failure, for a message; and where all of it is."""
        lines = [line for line in self._output.splitlines() if line.strip()]
        wanted = [line for line in lines if line.startswith(("ERROR", "error"))] or lines
        where = [f"    all of it: {self.venv / LOG}"] if (self.venv / LOG).is_file() else []
        return "\n".join([*(f"    │ {line[:200]}" for line in wanted[-SHOWN_LINES:]), *where])

    def install(self, pip: Sequence[str], requirements: Path) -> int:
        """By pip; its exit status."""
        self._part.mkdir(exist_ok=True)  # on the disk that has room for the packages, which /tmp may not have
        env = os.environ | {"PIP_REQUIRE_VIRTUALENV": "0", "PIP_USER": "0", "PYTHONUNBUFFERED": "1", "TMPDIR": str(self._part)}
        command = [*pip, "install", "--no-compile", "--disable-pip-version-check", "--progress-bar=off", "-r", str(requirements)]
        status = self.run("installing packages", command, env=env, detail=self._how_far)
        shutil.rmtree(self._part, ignore_errors=True)
        return status

    def _how_far(self, printed: str) -> str:
        if found := re.search(r"^Installing collected packages: (.*)$", printed, re.MULTILINE):
            names = found[1].split(", ")
            done = len(list(self.venv.glob("lib/python3.*/site-packages/*.dist-info/INSTALLER")))
            return f"copying {names[min(done, len(names) - 1)]} ({min(done + 1, len(names))} of {len(names)})"
        collected = re.findall(r"^(?:Collecting|Processing) (\S+)", printed, re.MULTILINE)
        if not collected:
            return ""
        # os.walk, unlike rglob, takes folders that pip removes meanwhile for empty.
        loaded = sum(_size(Path(folder, name)) for folder, _, names in os.walk(self._part) for name in names)
        return f"fetching {collected[-1].rpartition('/')[2]} ({len(collected)} packages{f', {loaded >> 20} MB' if loaded >> 20 else ''})"

    def compile(self) -> None:
        """Only what a start imports, a third of all: the rest compiles where it is imported first. Without it, and where
        PYTHONDONTWRITEBYTECODE is set (many containers), each start would compile torch again. A package that cannot be imported
        here is no error: a start reports it."""
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        python = [str(self.venv / "bin/python"), "-I", "-c", _IMPORT]
        self.run("compiling what a start needs", *([*python, *names] for names in IMPORTS), env=env)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # pip has removed it meanwhile
        return 0


def essential(venv: Path) -> list[str]:
    """Files whose loss shows that the environment is damaged, relative to it: the beginning of every package, and compiled libraries."""
    site = next(venv.glob("lib/python3.*/site-packages"), None)
    found = [venv / "pyvenv.cfg"]
    for folder, _, names in os.walk(site) if site else ():
        top = Path(folder) == site
        found += [Path(folder, n) for n in names if n == "__init__.py" or ".so" in n or (top and n.endswith(".py"))]
    return sorted(str(file.relative_to(venv)) for file in found if file.stat().st_size and "\n" not in str(file))
