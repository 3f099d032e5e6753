"""The installed torch, read from its version.py, since importing torch takes seconds."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

OLDEST = (2, 9)  # that a training of Duet runs with
NO_LIBUV = "use_libuv was requested but PyTorch was"  # built (2.4: 'build') without libuv support


@dataclass(frozen=True)
class TorchBuild:
    """`cuda`: CUDA version of the build; None for a CPU build."""

    version: str
    cuda: str | None
    folder: str = ""  # installation folder

    @property
    def number(self) -> tuple[int, int] | None:
        """Major and minor version; None if unknown."""
        found = re.match(r"(\d+)\.(\d+)", self.version)
        return (int(found[1]), int(found[2])) if found else None


def installed() -> TorchBuild | None:
    """None without torch or without its version.py."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    version = re.search(r"^__version__\s*=\s*['\"](.+?)['\"]", text, re.M)
    cuda = re.search(r"^cuda\b[^=]*=\s*['\"](.+?)['\"]", text, re.M)
    return TorchBuild(
        version.group(1) if version else "-",
        cuda.group(1) if cuda else None,
        str(Path(spec.origin).parent),
    )


def chosen_by(build: TorchBuild, environ: Mapping[str, str]) -> str:
    """The variable that selects this torch; '' if it belongs to the interpreter."""
    site = Path(build.folder).parent.resolve()
    for name in ("TORCH_LOCAL_PATH", "PYTHONPATH"):
        if any(Path(p).resolve() == site for p in environ.get(name, "").split(":") if p):
            return name
    return ""


def nccl() -> str | None:
    """Version of the NCCL package beside the installed torch; None if torch has its own."""
    build = installed()
    for folder in Path(build.folder).parent.glob("nvidia_nccl_cu*.dist-info") if build else ():
        return folder.name.removesuffix(".dist-info").partition("-")[2]
    return None
