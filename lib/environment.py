"""The Python environment of the project: `missing` tells what the running interpreter lacks, `make` builds .venv.

Runs with any Python >= 3.10 before anything is installed: standard library only, and not part of the package.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

OLDEST_TORCH = (2, 9)


def torch_version() -> tuple[int, ...] | None:
    """The version of an importable torch; found without importing it (that takes seconds)."""
    try:
        text = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    return tuple(int(n) for n in re.findall(r"\d+", text)[:2])


def direct_requirements(root: Path) -> list[str]:
    """Names of requirements.in."""
    lines = (root / "requirements.in").read_text().splitlines()
    return [re.split(r"[=<>~! ]", line, maxsplit=1)[0] for line in lines if line and not line.startswith("#")]


def missing(root: Path) -> list[str]:
    out = []
    version = torch_version()
    if version is None or version < OLDEST_TORCH:
        found = "no torch" if version is None else "torch " + ".".join(map(str, version))
        out.append(f"{found} ({'.'.join(map(str, OLDEST_TORCH))} or newer is needed)")
    for name in direct_requirements(root):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            out.append(f"no {name}")
    return out


def make(root: Path, stamp: str) -> int:
    """Build .venv from the lock file. The stamp is written last: an interrupted build is done again."""
    venv = root / ".venv"
    with open(root / ".venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two first runs at once: the second waits and finds it done
        stamp_file = venv / "duet.stamp"
        if stamp_file.exists() and stamp_file.read_text() == stamp:
            return 0
        without_torch, options = "torch=local" in stamp, []
        version = torch_version()
        if not without_torch and version and version >= OLDEST_TORCH and sys.prefix == sys.base_prefix:
            print(f"  torch {'.'.join(map(str, version))} of {sys.executable} is used (system site packages)", file=sys.stderr)
            without_torch, options = True, ["--system-site-packages"]
        shutil.rmtree(venv, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin/python")]
        if importlib.util.find_spec("pip"):
            options.append("--without-pip")  # twice as fast: the outer pip installs into it
        else:
            pip = [str(venv / "bin/python"), "-m", "pip"]
        made = subprocess.run([sys.executable, "-m", "venv", *options, str(venv)], stdout=sys.stderr, check=False)
        if made.returncode:
            print("[ERROR] `python3 -m venv` failed (try: apt-get install python3-venv)", file=sys.stderr)
            return 1
        wanted = (root / "requirements.lock").read_text().splitlines()
        chosen = venv / "requirements.txt"
        chosen.write_text("\n".join(line for line in wanted if not (without_torch and line.startswith("torch=="))) + "\n")
        bar = "on" if sys.stderr.isatty() else "off"
        done = subprocess.run(
            [*pip, "install", "--no-compile", "--disable-pip-version-check", "--progress-bar", bar, "-r", str(chosen)],
            stdout=sys.stderr,
            env=os.environ | {"PIP_REQUIRE_VIRTUALENV": "0", "PYTHONUNBUFFERED": "1"},
            check=False,
        )
        if done.returncode:
            print("[ERROR] installing the requirements failed: see pip's message above; run the same command again", file=sys.stderr)
            return 1
        stamp_file.write_text(stamp)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "make":
        sys.exit(make(Path(sys.argv[2]), sys.argv[3]))
    lacking = missing(Path(__file__).resolve().parent.parent)
    print(", ".join(lacking))
    sys.exit(bool(lacking))
