"""Fixtures of the unit tests: a working directory, problems of an invalid request, pasting of
suggested commands, a fake GPU driver."""

from __future__ import annotations

import importlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.monitor_runs import Made
from tests.unit.own_task import LINE
from training.core import find_run
from training.core import log as console
from training.core.errors import Exit, Problem, UserError
from training.core.rundir import RunDir, write_json
from training.host.process import STOP_SIGNALS
from training.plan import cli_args, request

if TYPE_CHECKING:
    from tests.unit.monitor_person import Person

ROOT = Path(__file__).resolve().parents[2]
SIMPLE, ENHANCED, LAUNCH, TRAIN = (
    "train_dual_gpu.sh",
    "train_dual_gpu_enhanced.sh",
    "launch_train.sh",
    "train.py",
)
Write = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run without contents; modules that need another one define it."""
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def clean_environment(**more: str) -> dict[str, str]:
    """The environment of this process without variables that configure a run."""
    skip = (
        "DUET_",
        "WANDB_",
        "TORCH",
        "NCCL_",
        "CUDA_",
        "PYTORCH_",
        "OMP_",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "FAKE_NVML",
    )
    return (
        {k: v for k, v in os.environ.items() if not k.startswith(skip)}
        | {"PYTHONPATH": str(ROOT)}
        | more
    )


def make_run(folder: Path, name: str, **config: object) -> RunDir:
    """A run directory as an earlier run leaves it."""
    run = RunDir(folder / name)
    run.create()
    write_json(run.plan, {"config": config})
    return run


def python(
    *args: str, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run this interpreter in the clean environment plus `variables`."""
    return subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=clean_environment(**variables),
        timeout=60,
        check=False,
    )


def ask(
    *args: str, script: str = ENHANCED, env: Mapping[str, str] | None = None
) -> request.Request:
    return request.read(script, list(args), env or {})


def wrong(
    *args: str, script: str = ENHANCED, env: Mapping[str, str] | None = None
) -> list[Problem]:
    """The problems of a request that must be rejected with Exit.CONFIG."""
    with pytest.raises(UserError) as caught:
        ask(*args, script=script, env=env)
    assert caught.value.code == Exit.CONFIG
    return caught.value.problems


def only(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, [p.what for p in problems]
    return problems[0]


@dataclass
class Shell:
    """A shell in a folder where Duet's programs only print their arguments."""

    folder: Path

    def paste(self, command: str) -> tuple[str, list[str]]:
        """(script, arguments) of a pasted command, as parsed by bash."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env={"PATH": f"{self.folder}:/usr/bin:/bin"},
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, f"invalid command {command!r}: {done.stderr.decode()}"
        script, *args = done.stdout.decode().split("\0")[:-1]
        if script == "python":
            assert args.pop(0) == "train.py"
            script = TRAIN
        return script, args

    def read(self, command: str, env: Mapping[str, str] | None = None) -> request.Request:
        """The request of a pasted command. Raises UserError if the command is invalid."""
        script, args = self.paste(command)
        return ask(*args, script=script, env=env)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    folder = tmp_path / "shell"
    folder.mkdir()
    for name in (SIMPLE, ENHANCED, LAUNCH, "python"):
        stub = folder / name
        stub.write_text(f"#!/bin/bash\nprintf '%s\\0' {name} \"$@\"\n")
        stub.chmod(0o755)
    return Shell(folder)


def with_flag(args: list[str], flag: str) -> list[str]:
    """`args` with a suggested flag, which replaces the flag that it corrects or is added."""
    (word,) = shlex.split(flag)
    name = word.removeprefix("--").partition("=")[0]
    same = {name, f"no_{name}"}
    return [
        a for a in args if a.removeprefix("--").partition("=")[0].replace("-", "_") not in same
    ] + [word]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which also contains the project's default folders."""
    folder = tmp_path / "my work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(cli_args, "ROOT", folder)
    monkeypatch.setattr(find_run, "WORK", folder)
    return folder


@pytest.fixture
def write(home: Path) -> Write:
    """write('name.py', 'text') → the path as a user would type it."""

    def file(name: str, text: str | bytes) -> str:
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    return file


@pytest.fixture
def line(write: Write) -> str:
    """The path of a user task, as a user would type it."""
    write("beside.py", "SLOPE = 2.0\n")
    return write("my line.py", LINE)


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores Python's import state after a file was loaded."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in ("my line", "beside", "lacking"):
            del sys.modules[name]


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore signal handlers, since a process that is stopping ignores further signals."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def pipes() -> Iterator[None]:
    """A command that was called here ends silently under `… | head`; later tests must not."""
    yield
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def _driver(folder: Path, *flags: str) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler for the fake NVIDIA library")
    source, library = ROOT / "tests/fake_nvml/fake_nvml.c", folder / "libnvidia-ml.so.1"
    options = ["-Wall", "-Werror", *flags, "-shared", "-fPIC"]
    subprocess.run([compiler, *options, "-o", library, source], check=True)
    return folder


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a fake NVIDIA library (see tests/fake_nvml/fake_nvml.c)."""
    return _driver(tmp_path_factory.mktemp("fake_nvml"))


@pytest.fixture(scope="session")
def old_driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment with one that lacks newer functions."""
    return {"LD_LIBRARY_PATH": str(_driver(tmp_path_factory.mktemp("old_nvml"), "-DOLD_DRIVER"))}


def fake_torch(folder: Path, cuda: str | None = "13.0", version: str = "2.99.0") -> Path:
    """A folder with a fake `torch` that cannot be imported; `cuda`: CUDA version of its build."""
    package = folder / f"torch for {cuda}" / "torch"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("raise ImportError('only looked at')\n")
    (package / "version.py").write_text(
        f"__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = None\n"
    )
    return package.parent


@pytest.fixture
def nvidia(fake_driver: Path) -> Callable[..., dict[str, Any]]:
    """Environment of a machine with a fake NVIDIA driver and a torch for it: nvidia(COUNT=2,
    FREE_GIB='31,5', CUDA_VISIBLE_DEVICES='0', torch='12.8')."""

    def environment(torch: str | None = "13.0", **values: object) -> dict[str, Any]:
        real = {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}
        named = {(k if k in real else f"FAKE_NVML_{k}"): str(v) for k, v in values.items()}
        path = f"{fake_torch(fake_driver, torch)}:{ROOT}"
        # of launches of other tests, too
        claims = {"TMPDIR": str(fake_driver)}
        return {"LD_LIBRARY_PATH": str(fake_driver), "PYTHONPATH": path, **claims, **named}

    return environment


@pytest.fixture
def on_small_disk(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python with a separate file system at `tmp_path/disk`, since root can write to folders
    that are read-only by mode."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no private mount namespace here (unshare -m)")
    disk = tmp_path / "disk"
    disk.mkdir()

    def run(*args: str, options: str, before: str = "true") -> subprocess.CompletedProcess[str]:
        script = (
            f'mount -t tmpfs -o {options} none "$1" && cd "$1" && {before} && shift && exec "$@"'
        )
        return subprocess.run(
            ["unshare", "-m", "bash", "-c", script, "bash", str(disk), sys.executable, *args],
            capture_output=True,
            text=True,
            env=clean_environment(),
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "experiments" / "small run")


@pytest.fixture
def people() -> Iterator[Callable[..., Person]]:
    """Users at terminals, which are closed at the end."""
    for package in ("pexpect", "pyte"):  # test tools, missing on a lent GPU machine
        pytest.importorskip(package)
    from tests.unit.monitor_person import Person

    seated: list[Person] = []

    def sit_down(*argv: str, **how: Any) -> Person:
        seated.append(Person(*argv, **how))
        return seated[-1]

    yield sit_down
    for person in seated:
        person.child.close(force=True)
        assert not person.child.isalive()


@pytest.fixture
def sit(made: Made, people: Callable[..., Person]) -> Callable[..., Person]:
    """A user who monitors a running run."""
    made.supervisor(os.getpid()).steps(100).beats()
    return lambda *argv, **how: people(f"--run={made.run.path}", "--interval=0.2", *argv, **how)


@pytest.fixture
def copied() -> Callable[[Path], Path]:
    """Copy the monitor into another project with its own runs: copied(folder) → the script."""

    def copy(project: Path) -> Path:
        for name in ("lib", "training"):
            shutil.copytree(
                ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        return Path(shutil.copy(ROOT / "monitor_training.sh", project))

    return copy


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """The log file of the console, which is opened for this test."""
    importlib.reload(console)
    console.open_log(tmp_path / "run.log")
    yield tmp_path / "run.log"
    importlib.reload(console)
