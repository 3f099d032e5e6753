"""Start again with a newer Python, where the usual one is older than Duet's oldest (RHEL 8 and 9,
Debian 11). Runs in that old one, 3.6 or newer."""

import os
import shutil
import subprocess
import sys

NAMES = [f"python3.{minor}" for minor in (12, 13, 14, 11, 10)]
PYTHON = "--python="
NEW = "import sys; sys.exit(sys.version_info < (3, 10))"


def use() -> None:
    """Never returns."""
    asked = [word[len(PYTHON) :] for word in sys.argv if word.startswith(PYTHON)]
    for name in [*map(os.path.expanduser, asked), *NAMES]:
        path = shutil.which(name)
        if path and subprocess.call([path, "-c", NEW], stderr=subprocess.DEVNULL) == 0:
            os.execv(path, [path, "-m", "benchmarks.gpu", *sys.argv[1:]])
    version = ".".join(map(str, sys.version_info[:2]))
    sys.stderr.write(
        f"[ERROR] Python {version} is older than 3.10\n"
        "    try:     make gpu GPU_FLAGS=--python=PATH\n"
    )
    sys.exit(3)
