"""Build the null GPU for a CUDA build of torch: `python build.py TORCH FOLDER`, where TORCH is the
folder of its package. Needs gcc and nm."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("device.c", "memory.c", "stream.c", "nccl.c", "process.c", "properties.c")
FLAGS = ["-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter"]
NAME = re.compile(r"(?:__)?(?:cuda[A-Z]|cublas|nccl)\w+")
# The CUDA runtime's own copies of these are fine: they only keep lists of the kernels in a library.
REGISTRATION = re.compile(r"__cuda(Pop|Push|Register|Unregister|Init)\w*")


def build(torch: Path, folder: Path) -> None:
    """Write libcuda.so.1 and libnvidia-ml.so.1 into `folder`. Raises CalledProcessError."""
    # The runtime's own headers first: Triton's, which are complete, may be of an older CUDA.
    includes = [
        f"-I{folder}"
        for folder in (
            *torch.parent.glob("nvidia/cu*/include"),
            *(file.parent.parent for file in torch.parent.glob("**/crt/host_defines.h")),
        )
    ]
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libcuda.so.1"
    with tempfile.TemporaryDirectory() as work:
        stubs = Path(work) / "stubs.c"
        stubs.write_text(_stubs(torch))
        sources = [*(HERE / name for name in SOURCES), stubs]
        _run("gcc", *FLAGS, f"-I{HERE}", *includes, "-Wl,-soname,libcuda.so.1",
             "-o", library, *sources, "-ldl", "-lm", "-lpthread", "-lrt")  # fmt: skip
    (folder / "libcuda.so").unlink(missing_ok=True)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")  # the name that Triton links
    own = (HERE / "nvml.c", HERE / "process.c")
    _run("gcc", *FLAGS, f"-I{HERE}", "-o", folder / "libnvidia-ml.so.1", *own)


def _stubs(torch: Path) -> str:
    """Functions that torch calls and that need no behaviour: each counts its calls."""
    wanted: set[str] = set()
    for library in sorted((torch / "lib").glob("*.so")):
        symbols = _said("nm", "-D", "--undefined-only", library)
        wanted |= {line.split()[-1].split("@")[0] for line in symbols.splitlines()}
    written = set(re.findall(r"^[\w *]*?\b(\w+)\(", _sources(), re.MULTILINE))
    written |= {f"{name}_v2" for name in written}  # in CUDA 12
    names = sorted(n for n in wanted - written if NAME.fullmatch(n) and not REGISTRATION.match(n))
    bodies = (f'int {name}(void) {{ COUNT("{name}"); return fault(); }}' for name in names)
    return "\n".join(['#include "null_gpu.h"', *bodies, ""])


def _sources() -> str:
    return "".join((HERE / name).read_text() for name in SOURCES)


def _said(*command: object) -> str:
    return subprocess.run(
        [str(part) for part in command], check=True, capture_output=True, text=True
    ).stdout.strip()


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
