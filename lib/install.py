"""Filling an environment with packages, for lib/environment.py: by uv where it is on this machine,
else by pip.

One line shows how far it is; what the programs print goes to a file. Standard library only.
"""

from __future__ import annotations

import configparser
import functools
import importlib.util
import os
import re
import shlex
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
KILLED = 128  # an exit status beyond it is a signal
PIP_QUIET = ("--no-compile", "--disable-pip-version-check", "--progress-bar=off")
# What a start of a training imports, in two parts of equal work. Importing it is what compiles it.
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
    """The steps of one installation. `title`: what is shown as long as it takes. The open file
    `lock` stays locked as long as a program of them lives."""

    def __init__(self, title: str, venv: Path, lock: int) -> None:
        self.title, self.venv, self.lock, self._output, self._part = (
            title,
            venv,
            lock,
            "",
            venv / "tmp",
        )
        self._begin = self._said = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def run(
        self,
        what: str,
        *commands: Sequence[str],
        env: Mapping[str, str] | None = None,
        detail: Callable[[str], str] | None = None,
    ) -> int:
        """Run programs side by side to their ends; the highest exit status. `detail`: how far they
        are, from what they have printed."""
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
            with (self.venv / LOG).open("a", encoding="utf-8") as log:
                log.writelines(
                    f"{line}\n"
                    for line in (
                        f"# {what}",
                        *self._output.splitlines(),
                        f"# {time.monotonic() - begin:.1f} s",
                    )
                )
        return max(
            (
                status if status >= 0 else KILLED - status
                for status in (program.returncode for program in running)
            ),
            default=0,
        )

    def _show(self, state: str) -> None:
        """The one line of progress: in place on a terminal, every 15 s in a log."""
        text = f"{self.title}: {state}, {self.seconds():.0f} s"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
            sys.stderr.flush()
        elif time.monotonic() - self._said >= SAY_EVERY_S:
            self._said = time.monotonic()
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
        """All of it, whatever place the programs write at."""
        return os.pread(output.fileno(), os.fstat(output.fileno()).st_size, 0).decode(
            "utf-8", "replace"
        )

    def last_words(self) -> str:
        """The end of what the last programs printed, for a message; and where all of it is."""
        lines = [line for line in self._output.splitlines() if line.strip()]
        wanted = [line for line in lines if line.startswith(("ERROR", "error"))] or lines
        where = [f"    all of it: {self.venv / LOG}"] if (self.venv / LOG).is_file() else []
        return "\n".join([*(f"    │ {line[:200]}" for line in wanted[-SHOWN_LINES:]), *where])

    def install(self, requirements: Path, *options: str) -> str:
        """Install these into the environment; the problem if there is one."""
        # on the disk that has room for the packages, which /tmp may not have
        self._part.mkdir(exist_ok=True)
        env = os.environ | {
            "PIP_REQUIRE_VIRTUALENV": "0",
            "PIP_USER": "0",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self._part),
        }
        words = ["-r", str(requirements), *options]
        uv, ways = shutil.which("uv"), []
        if uv:
            command = [
                uv,
                "pip",
                "install",
                "--python",
                str(self.venv / "bin/python"),
                *uv_sources(env),
                *words,
            ]
            ways.append(("uv", command, ["--no-progress", "--color=never"]))
        # also where uv fails: pip may know a proxy or a password that uv does not
        if not uv or has_pip(self.venv):
            ways.append(("pip", [*pip(self.venv), "install", *words], [*PIP_QUIET]))
        name, command, status = "", [], 0
        for name, command, quiet in ways:
            status = self.run(
                f"packages, by {name}", [*command, *quiet], env=env, detail=self._how_far
            )
            if status == 0 or status > KILLED:
                break
        shutil.rmtree(self._part, ignore_errors=True)
        return (
            f"{name} failed\n{self.last_words()}\n    try:     {shlex.join(command)}"
            if status
            else ""
        )

    def _how_far(self, printed: str) -> str:
        """From the output of pip or uv: what is being fetched or copied."""
        if found := re.search(r"^Installing collected packages: (.*)$", printed, re.MULTILINE):
            names = found[1].split(", ")
            done = len(list(self.venv.glob("lib/python3.*/site-packages/*.dist-info/INSTALLER")))
            return (
                f"copying {names[min(done, len(names) - 1)]} ({min(done + 1, len(names))} of "
                f"{len(names)})"
            )
        # uv, of the larger ones
        loading = re.findall(r"^Downloading (\S+) \(", printed, re.MULTILINE)
        if under_way := [
            name
            for name in loading
            if not re.search(rf"^\s*Downloaded {re.escape(name)}$", printed, re.MULTILINE)
        ]:
            return (
                f"fetching {', '.join(under_way[:3])} ({len(loading) - len(under_way)} of "
                f"{len(loading)} large ones are there)"
            )
        collected = re.findall(r"^(?:Collecting|Processing) (\S+)", printed, re.MULTILINE)
        if not collected:
            return ""
        # os.walk, unlike rglob, takes folders that pip removes meanwhile for empty.
        loaded = sum(
            _size(Path(folder, name)) for folder, _, names in os.walk(self._part) for name in names
        )
        return (
            f"fetching {collected[-1].rpartition('/')[2]} ({len(collected)} "
            f"packages{f', {loaded >> 20} MB' if loaded >> 20 else ''})"
        )

    def compile(self) -> None:
        """Only what a start imports, a third of all: the rest compiles where it is imported first.
        Without it, and where PYTHONDONTWRITEBYTECODE is set (many containers), each start would
        compile torch again. A package that cannot be imported here is no error: a start reports
        it."""
        env = {
            name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
        }
        python = [str(self.venv / "bin/python"), "-I", "-c", _IMPORT]
        self.run("compiling what a start needs", *([*python, *names] for names in IMPORTS), env=env)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # pip has removed it meanwhile
        return 0


def outer_pip() -> Path | None:
    """The runner by which the pip of this Python fills another environment: twice as fast as to
    install a pip there first. Not by `pip --python`, which older pips lack and which starts a
    grandchild that would outlive a killed pip."""
    spec = importlib.util.find_spec("pip")
    runner = Path(spec.origin).with_name("__pip-runner__.py") if spec and spec.origin else None
    return runner if runner and runner.is_file() else None


def pip(venv: Path) -> list[str]:
    """The command of a pip that installs into this environment."""
    runner = outer_pip()
    return [str(venv / "bin/python"), *([str(runner)] if runner else ["-m", "pip"])]


def has_pip(venv: Path) -> bool:
    return outer_pip() is not None or any(venv.glob("lib/python3.*/site-packages/pip/__main__.py"))


def uv_sources(environ: Mapping[str, str]) -> list[str]:
    """Where pip takes packages from on this machine, for uv, which does not read pip's settings;
    nothing where uv has its own."""
    if any(
        name.startswith("UV_") and name.endswith(("INDEX", "INDEX_URL", "FIND_LINKS"))
        for name in environ
    ):
        return []
    found: dict[str, str] = {}
    home, config = Path.home(), Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    files = [
        Path("/etc/xdg/pip/pip.conf"),
        Path("/etc/pip.conf"),
        home / ".pip/pip.conf",
        config / "pip/pip.conf",
    ]
    if own := environ.get("PIP_CONFIG_FILE"):
        files = [] if own == os.devnull else [*files, Path(own)]
    parser = configparser.RawConfigParser()
    try:
        parser.read(files, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):  # pip refuses such a file; uv does without
        return []
    for section in filter(parser.has_section, ("global", "install")):
        found |= {name.replace("_", "-"): value for name, value in parser[section].items()}
    found |= {
        name[4:].lower().replace("_", "-"): value
        for name, value in environ.items()
        if name.startswith("PIP_")
    }
    names = {
        "index-url": "--index-url",
        "extra-index-url": "--extra-index-url",
        "find-links": "--find-links",
    }
    words = [
        f"{flag}={value}" for name, flag in names.items() for value in found.get(name, "").split()
    ]
    words += (
        ["--no-index"] if found.get("no-index", "").lower() in ("1", "true", "yes", "on") else []
    )
    # pip looks through all of them, uv by itself only in the first one that has the package.
    return [*words, "--index-strategy=unsafe-best-match"] if words else []


def essential(venv: Path) -> list[str]:
    """Files whose loss shows that the environment is damaged, relative to it: the beginning of
    every package, and compiled libraries."""
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
