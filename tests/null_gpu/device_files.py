"""Files whose links in /proc/PID/fd read /dev/nvidiaN, as those of a GPU's driver do; /dev is not
touched. Needs no root, but a system that allows user namespaces."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEVICES = 16  # as in null_gpu.h
# A mount that is in no folder any more: the paths of its files begin at its own root.
MOUNTED = 'mount --bind "$0" "$0" && cd "$0" && umount -l "$0" && echo mounted && read -r _'


@contextmanager
def device_files(folder: Path) -> Iterator[Path | None]:
    """A path of this folder below which they are dev/nvidiaN; None where that is not allowed."""
    (folder / "dev").mkdir(parents=True)
    for number in range(DEVICES):
        (folder / "dev" / f"nvidia{number}").touch()
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", MOUNTED, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as helper:
        assert helper.stdout
        allowed = helper.stdout.readline() != b""
        root = os.open(f"/proc/{helper.pid}/cwd", os.O_PATH) if allowed else None
        helper.communicate()
    if root is None:
        yield None
        return
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{root}")
    finally:
        os.close(root)
