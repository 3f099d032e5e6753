"""Resolves pyproject.toml into requirements.lock, for `make lock`. Needs uv and a network or
PIP_FIND_LINKS.

One lock file serves Python 3.10 and newer (markers), pip and uv, in sections: `run` first, then the
additional packages of each later section. torch itself is pinned by hand in pyproject.toml; it pins
its GPU dependencies (triton, the CUDA libraries) exactly, so they are not repeated here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = "3.10"
HEADER = """\
# Made by 'make lock' from pyproject.toml; pip and uv read it: pip install -c requirements.lock -e '.[full]'
# The scripts install the first part into .venv. torch brings its own exact pins of triton and the CUDA libraries.
"""
# Section → options that it adds to the previous ones, and its comment.
SECTIONS = {
    "run": (["--extra=full"], ""),
    "extras": (
        ["--extra=data", "--extra=fp8", "--extra=restore", "--extra=lmdb", "--extra=prometheus"],
        "`make extras` adds these to .venv",
    ),
    "dev": (["--group=dev"], "`make env` adds these to .venv"),
    "peers": (["--group=peers"], "`make peers` installs these beside .venv"),
}
BROUGHT_BY_TORCH = re.compile(r"(torch|triton|nvidia-(?!ml-py\b)[a-z0-9-]+|cuda-[a-z0-9-]+)==")


def resolve(wanted: list[str], known: list[str]) -> list[str]:
    """Sorted pins from uv for these extras and groups; `known` pins are kept. Raises SystemExit."""
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "--quiet",
        "--universal",
        "--python-version",
        OLDEST_PYTHON,
    ]
    command += [
        "--no-annotate",
        "--no-header",
        "--no-emit-index-url",
        "--no-emit-find-links",
        *wanted,
    ]
    env = dict(os.environ)
    if "PIP_FIND_LINKS" in env:  # uv does not read pip's variables
        env.setdefault("UV_FIND_LINKS", env["PIP_FIND_LINKS"])
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(known))
        constraints.flush()
        command += ["--constraint", constraints.name, "pyproject.toml"]
        done = subprocess.run(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=False
        )
    if done.returncode:
        sys.exit(
            f"uv could not resolve {' '.join(wanted)} (exit {done.returncode}): requirements.lock "
            f"is unchanged"
        )
    return [
        line
        for line in done.stdout.splitlines()
        if line[:1] not in ("", "#") and not BROUGHT_BY_TORCH.match(line)
    ]


def lock(torch: str) -> str:
    """The text of the lock file."""
    wanted: list[str] = []
    pins: list[str] = []
    first: dict[str, str] = {}  # package → the first section that needs it
    for section, (adds, _) in SECTIONS.items():
        wanted += adds
        pins = resolve(wanted, pins)
        for pin in pins:
            first.setdefault(pin.partition("==")[0], section)
    text = f"{HEADER}{torch}\n"
    for section, (_, comment) in SECTIONS.items():
        text += f"# [{section}] {comment}\n" if comment else ""
        # From the last resolution, whose markers fit every section.
        text += "".join(f"{pin}\n" for pin in pins if first[pin.partition("==")[0]] == section)
    return text


def main() -> int:
    target = ROOT / "requirements.lock"
    (torch,) = re.findall(
        r'"(torch==[^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )
    text = lock(torch)
    changed = not target.exists() or target.read_text(encoding="utf-8") != text
    target.write_text(text, encoding="utf-8")
    print(f"{target.name}: {'changed' if changed else 'unchanged'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
