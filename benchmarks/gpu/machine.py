"""The machine that is measured: its GPUs, driver and torch, and the Python that has them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training.host import toolchain
from training.host.decisions import best_type
from training.host.gpu_choice import ORDER, PCI

ROOT = Path(__file__).resolve().parents[2]
# What the stages run, and what they write.
SOURCES = (
    *("benchmarks", "configs", "lib", "tests", "training"),
    *("launch_train.sh", "pyproject.toml", "train.py"),
)
RESULTS = "results"  # the folder of published results
PROBE_S = 600.0  # importing torch from a cold disk of a busy machine
OLDEST_PYTHON, OLDEST_TORCH = (3, 10), (2, 9)

# Run by a candidate interpreter: prints its facts, with "error" if it cannot measure.
PROBE = """
import ctypes, importlib.util, json, os, sys
facts = {"python": sys.version.split()[0]}
facts["missing"] = [n for n in %r if importlib.util.find_spec(n) is None]
try:
    import torch
    facts["torch"], facts["cuda"] = torch.__version__, torch.version.cuda
    if sys.version_info >= (3, 10):  # in an older one the package starts a newer one
        from benchmarks.gpu import in_use
        facts.update(in_use.choose())  # before CUDA numbers the GPUs
    facts["null_gpu"] = hasattr(ctypes.CDLL(None), "null_gpu_count")
    facts["gpus"] = [
        {"name": p.name, "memory_bytes": p.total_memory, "capability": [p.major, p.minor]}
        for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    facts["peer_access"] = len(facts["gpus"]) > 1 and torch.cuda.can_device_access_peer(0, 1)
    facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if facts["gpus"] else None
    from types import SimpleNamespace
    from training.host import toolchain
    seen = [SimpleNamespace(**gpu) for gpu in facts["gpus"]]
    facts["no_compiler"] = ", ".join(toolchain.missing("cuda", os.environ, seen))
except Exception as error:
    facts["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(facts))
"""
PACKAGES = ("numpy", "psutil", "pynvml", "tqdm", "tensorboard", "pytest")


class NoGpu(Exception):
    """No Python here has a torch with a GPU; the text names each candidate with its reason."""


@dataclass(frozen=True)
class Machine:
    """`executable`: the Python of all trainings; `missing`: modules that it lacks."""

    executable: str
    python: str
    torch: str
    cuda: str | None  # of torch
    nccl: str | None
    driver: str | None  # None: not reported
    gpus: list[dict[str, Any]]  # name, memory_bytes, capability
    peer_access: bool  # between the first two GPUs
    null_gpu: bool  # a device that computes nothing (tests/null_gpu)
    missing: list[str]
    cpu: str
    cores: int
    memory_bytes: int
    no_compiler: str = ""  # what torch.compile lacks here
    first: str = "0"  # CUDA_VISIBLE_DEVICES of one rank
    in_use: Sequence[str] = ()  # by others: a line for each GPU

    @property
    def bf16(self) -> bool:
        """Whether Duet computes in bf16 on the first GPU."""
        gpu = self.gpus[0]
        return best_type(tuple(gpu["capability"]), str(gpu["name"])) == "bf16"

    @property
    def gpu(self) -> str:
        return str(self.gpus[0]["name"])

    @property
    def title(self) -> str:
        """Name of the machine in tables."""
        names = [str(gpu["name"]) for gpu in self.gpus]
        counts = {name: names.count(name) for name in names}
        gpus = ", ".join(f"{count} × {name}" for name, count in counts.items())
        return ("null GPU: " if self.null_gpu else "") + gpus

    def record(self) -> dict[str, Any]:
        return asdict(self)


def kernels(cache: Path) -> dict[str, str]:
    """Variables of torch for its compiled kernels below `cache`."""
    return dict(
        zip(toolchain.CACHES, map(str, (cache / "inductor", cache / "triton")), strict=True)
    )


def cache_of(folder: Path) -> Path:
    """A folder for compiled kernels: inside `folder`, unless its file system is mounted noexec."""
    there = folder
    while not there.exists():
        there = there.parent
    if not os.statvfs(there).f_flag & os.ST_NOEXEC:
        return folder / "cache"
    users = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(users).expanduser() / "duet_gpu_benchmark"


def find(cache: Path, asked: str = "") -> Machine:
    """The first Python with GPUs: `asked`, or this one, .venv, the ones on PATH. `cache`: of
    compiled kernels. Raises NoGpu."""
    reasons = []
    for executable in [asked] if asked else _candidates():
        facts = _probe(executable, cache)
        reason = facts.get("error") or _unusable(facts)
        if not reason:
            return _machine(executable, facts)
        reasons.append(f"{executable}: {reason}")
    raise NoGpu("\n".join(reasons))


def commit(root: Path | None = None, sources: Sequence[str] = SOURCES) -> str:
    """Commit of a checkout (None: Duet's), with '+' and a hash of the changes if its sources differ
    from it; without a commit 'unknown', with '+' and a hash of all sources."""
    root = root or ROOT
    git = ("git", "-C", str(root))
    try:
        if Path(_output(*git, "rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return _without_commit(root, sources)  # an unpacked copy inside another checkout
        name = _output(*git, "rev-parse", "--short=12", "HEAD")
        run = (*sources, f":(exclude)benchmarks/{RESULTS}")
        changes = subprocess.run(
            [*git, "diff", "HEAD", "--", *run], check=True, capture_output=True, timeout=60
        ).stdout
        others = _output(*git, "ls-files", "-z", "--others", "--exclude-standard", *sources)
    except (OSError, subprocess.SubprocessError):
        return _without_commit(root, sources)
    unknown = set(others.split("\0"))
    new = [one for one in _files(root, sources) if str(one.relative_to(root)) in unknown]
    return name + (f"+{_hash(root, new, changes)}" if changes or new else "")


def _without_commit(root: Path, sources: Sequence[str]) -> str:
    return f"unknown+{_hash(root, _files(root, sources))}"


def _files(root: Path, sources: Sequence[str]) -> list[Path]:
    """Every file of the sources that a measurement may depend on."""
    places = [root / name for name in sources]
    found = [file for place in places for file in (place, *place.rglob("*")) if file.is_file()]
    left_out = {RESULTS, "__pycache__"}
    return sorted(file for file in found if not left_out & {*file.relative_to(root).parts})


def _hash(root: Path, files: list[Path], begin: bytes = b"") -> str:
    found = hashlib.sha256(begin)
    for file in files:
        content = file.read_bytes()
        found.update(f"{file.relative_to(root)}\0{len(content)}\0".encode() + content)
    return found.hexdigest()[:8]


def _candidates() -> list[str]:
    found = [
        sys.executable,
        str(ROOT / ".venv/bin/python"),
        *map(shutil.which, ("python3", "python")),
    ]
    return list(dict.fromkeys(path for path in found if path and os.access(path, os.X_OK)))


def _probe(executable: str, cache: Path) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [executable, "-c", PROBE % (PACKAGES,)],
            cwd=ROOT,
            env={ORDER: PCI} | os.environ | kernels(cache) | {"DUET_LANG": "en"},
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=True,
        )
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"torch is not imported after {PROBE_S:.0f} s"}
    except subprocess.CalledProcessError as error:
        return {"error": (error.stderr.strip().splitlines() or [f"status {error.returncode}"])[-1]}
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return {"error": str(error)}
    return facts


def _unusable(facts: dict[str, Any]) -> str:
    """Why this Python cannot measure; '' if it can."""
    if _version(facts["python"]) < OLDEST_PYTHON:
        return f"Python {facts['python']} is older than 3.10"
    if _version(facts["torch"]) < OLDEST_TORCH:
        return f"torch {facts['torch']} is older than 2.9"
    if "numpy" in facts["missing"]:
        return "numpy is not installed"
    if not facts["gpus"]:
        build = f"CUDA {facts['cuda']}" if facts["cuda"] else "a CPU build"
        return f"torch {facts['torch']} ({build}) has no GPU"
    return ""


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def _machine(executable: str, facts: dict[str, Any]) -> Machine:
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Machine(
        executable=executable,
        python=facts["python"],
        torch=facts["torch"],
        cuda=facts["cuda"],
        nccl=facts["nccl"],
        driver=None if facts["null_gpu"] else _driver(),
        gpus=facts["gpus"],
        peer_access=facts["peer_access"],
        null_gpu=facts["null_gpu"],
        missing=facts["missing"],
        cpu=cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=pages * page,
        no_compiler=facts["no_compiler"],
        first=facts["first"],
        in_use=facts["in_use"],
    )


def _driver() -> str | None:
    """Version of the NVIDIA driver, without its Python package."""
    try:
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        return _output(*query).splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module\D*([\d.]+)", text)
    return found[1] if found else None


def cpu() -> str:
    try:
        found = re.search(
            r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def _output(*command: str) -> str:
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()
