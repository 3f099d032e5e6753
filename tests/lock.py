"""Resolve the requirements*.in files again: what `make lock` runs. Needs uv, and a network or PIP_FIND_LINKS.

One lock file serves Python 3.10 and all newer ones (markers). torch itself is pinned in requirements.in by hand; what it
brings for GPUs (triton, the CUDA libraries) it pins exactly, so naming them here could only disagree.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = "3.10"
FILES = {
    "requirements": " torch brings its own exact pins of triton and the CUDA libraries.",
    "requirements-extras": "",
    "requirements-dev": "",
    "requirements-bench": " Installed beside .venv by 'make peers'.",
}
BROUGHT_BY_TORCH = re.compile(r"(torch|triton|nvidia-(?!ml-py\b)[a-z0-9-]+|cuda-[a-z0-9-]+)==")


def resolve(source: str) -> list[str]:
    """The pins that uv finds, sorted, without comments."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", OLDEST_PYTHON]
    command += ["--no-annotate", "--no-header", "--no-emit-index-url", "--no-emit-find-links", source]
    env = dict(os.environ)
    if "PIP_FIND_LINKS" in env:  # uv does not read pip's variables
        env.setdefault("UV_FIND_LINKS", env["PIP_FIND_LINKS"])
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"uv could not resolve {source} (exit {done.returncode}): its lock file stays as it is")
    return [line for line in done.stdout.splitlines() if line and not line.startswith("#")]


def lock(name: str, pins: Iterable[str], wanted: str) -> str:
    """The text of a lock file. `wanted` is the text of the .in file, whose pin of torch stands first."""
    torch = re.findall(r"^torch==\S+", wanted, re.MULTILINE)
    kept = [pin for pin in pins if not BROUGHT_BY_TORCH.match(pin)]
    return "\n".join([f"# Made by 'make lock' from {name}.in.{FILES[name]}", *torch, *kept, ""])


def main() -> int:
    for name in FILES:  # in this order: the others are resolved against the new pins of the product
        source = ROOT / f"{name}.in"
        if not source.exists():  # a copy without the benchmarks
            continue
        target = source.with_suffix(".lock")
        text = lock(name, resolve(source.name), source.read_text(encoding="utf-8"))
        changed = not target.exists() or target.read_text(encoding="utf-8") != text
        target.write_text(text, encoding="utf-8")
        print(f"{target.name}: {'changed' if changed else 'the same as before'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
