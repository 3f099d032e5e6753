"""First start of a fresh checkout."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

# A start up to its plan; a dry run alone would need no environment.
CODE = 'source lib/init.sh; python::find || venv::make; run::plan "$@"'
START = [
    "bash",
    "-c",
    CODE,
    "train_dual_gpu.sh",
    "configs/dual_gpu/quickstart.py",
    "--device=cpu",
    "--dry_run",
]
# Settings of the developer that must not affect the tests.
PERSONAL = ("VIRTUAL_ENV", "CONDA_PREFIX", "TORCH_LOCAL_PATH", "PYTHONPATH", "PYTHONHOME")


@dataclass
class Done:
    code: int
    out: str
    err: str
    seconds: float


@dataclass
class User:
    """A fresh checkout, with the Python that is first on PATH."""

    folder: Path
    env: dict[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def venv(self) -> Path:
        return self.folder / ".venv"

    def start(self, *command: str, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command or START,
            cwd=self.folder,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *command: str, **env: str) -> Done:
        begin = time.monotonic()
        process = self.start(*command, **env)
        out, err = process.communicate(timeout=200)
        return Done(process.returncode, out, err, time.monotonic() - begin)

    def plan(self, **env: str) -> Done:
        """Start up to the plan; must succeed."""
        done = self.run(**env)
        assert done.code == 0, done.err
        assert done.out.startswith("Plan (dry run"), done.out
        return done

    def installed(self) -> dict[str, str]:
        code = (
            "from importlib import metadata as m; [print(d.name, d.version) for d in "
            "m.distributions()]"
        )
        listed = subprocess.run(
            [self.venv / "bin/python", "-I", "-c", code], capture_output=True, text=True, check=True
        ).stdout
        return dict(line.split() for line in listed.splitlines())


def python_without(folder: Path, *modules: str) -> Path:
    """A Python without pip and without these modules."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    (site / "sitecustomize.py").write_text(
        "import sys\nclass Missing:\n    def find_spec(self, name, path=None, target=None):\n"
        f"        if name in {modules!r}:\n            raise ModuleNotFoundError(f'No module named "
        f"{{name!r}}')\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    return folder


def names(user: User) -> set[str]:
    return set(user.installed())
