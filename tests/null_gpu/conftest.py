"""Two null GPUs for the tests of this folder: real runs on the CUDA build of torch. Skipped where
that is not installed; `make gpu-path` installs it and runs them."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import Launched, Launcher
from tests.null_gpu.build import build
from tests.null_gpu.device_files import device_files
from tests.null_gpu.programs import CUDA_TORCH, environment
from training.watchdog.probes import procfs

GIB = 1 << 30
CONTEXT = 600 << 20  # as in null_gpu.h
# DeviceState of null_gpu.h: fault, stalled, slow_us, unused, then a table of processes
_STATE = struct.Struct("<iiii")
_USE = struct.Struct("<iIQ")  # pid, its start (as in procfs.began), bytes
_STATE_SIZE = _STATE.size + 32 * _USE.size


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.null_gpu)


@dataclass
class NullGpus:
    """The environment of a program with null GPUs, and their state while it runs."""

    environ: dict[str, str]
    state: Path

    def break_down(self, device: int, error: int) -> None:
        """From now on every CUDA call on this device returns this error."""
        self._write(device, 0, error)

    def stall(self, device: int) -> None:
        """Nothing that is queued on this device ends any more."""
        self._write(device, 1, 1)

    def repair(self, device: int) -> None:
        """A lost device is back; its rank must have ended."""
        self._write(device, 0, 0)

    def go_on(self, device: int) -> None:
        """A device that was stalled works again."""
        self._write(device, 1, 0)

    def slow_down(self, device: int, kernel_us: int) -> None:
        """From now on each of its kernels takes this time."""
        self._write(device, 2, kernel_us)

    def occupy(self, device: int, gib: float) -> None:
        """This process takes so much memory of the device."""
        own = (os.getpid(), procfs.began(os.getpid())) if gib else (0, 0)
        self.enter(device, *own, int(gib * GIB))

    def enter(self, device: int, pid: int, began: int, size: int) -> None:
        """That process takes it; in the last line of the table."""
        with self._shared() as shared:
            last = device * _STATE_SIZE + _STATE.size + 31 * _USE.size
            _USE.pack_into(shared, last, pid, began, size)

    def processes(self, device: int) -> set[int]:
        """Those that live and have a context on this device."""
        return {pid for pid, began in self.all_processes(device) if procfs.began(pid) == began}

    def all_processes(self, device: int) -> set[tuple[int, int]]:
        """PID and start; also of those that have ended, until others take their places."""
        start = device * _STATE_SIZE + _STATE.size
        table = self.state.read_bytes()[start : start + 32 * _USE.size]
        return {(pid, began) for pid, began, _ in _USE.iter_unpack(table) if pid}

    @contextmanager
    def _shared(self) -> Iterator[mmap.mmap]:
        """The state, also before a process has made it."""
        self.state.touch()
        os.truncate(self.state, max(self.state.stat().st_size, 16 * _STATE_SIZE))
        with self.state.open("r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
            yield shared

    def _write(self, device: int, field: int, value: int) -> None:
        with self._shared() as shared:
            struct.pack_into("<i", shared, device * _STATE_SIZE + 4 * field, value)


def duet(gpus: NullGpus, project: Path, *command: object) -> str:
    """What a command prints that ends with 0."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=project,
        env=os.environ | gpus.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (CUDA_TORCH / "torch").is_dir():
        pytest.skip("no CUDA build of torch in .tools/cuda: make gpu-path installs it")
    for tool in ("gcc", "nm"):
        if not shutil.which(tool):
            pytest.skip(f"no {tool} on this machine")
    folder = tmp_path_factory.mktemp("null_gpu")  # LD_PRELOAD splits at spaces
    build(CUDA_TORCH / "torch", folder)
    return folder


@pytest.fixture(scope="session")
def root(libraries: Path) -> Iterator[dict[str, str]]:
    """The variable for device files; empty where this system allows none."""
    with device_files(libraries / "root") as folder:
        yield {"NULL_GPU_ROOT": str(folder)} if folder else {}


@pytest.fixture
def gpus(libraries: Path, root: dict[str, str], tmp_path: Path) -> NullGpus:
    state = tmp_path / "gpu_state"
    return NullGpus(environment(libraries, state) | root, state)


@pytest.fixture
def train(
    gpus: NullGpus, project: Path, tmp_path: Path, token: str
) -> Iterator[Callable[..., Launched]]:
    """A training on two null GPUs, or on `ranks`; flags as in tests/e2e."""
    launcher = Launcher(project, tmp_path, token)

    def start(*, env: dict[str, str] | None = None, ranks: int = 2, **flags: object) -> Launched:
        text = tmp_path / "text.txt"
        if not text.exists():
            text.write_text("".join(f"line {i} of the text\n" for i in range(4000)))
        values = {"device": "auto", "data": text, "compile": 0, "sample_tokens": 0}
        # Checksums that nothing computes are what the memory contained: ranks may differ.
        values |= {"inspect_every": 0} | flags
        count = {"NULL_GPU_COUNT": str(ranks), "FAKE_NVML_COUNT": str(ranks)}
        environ = gpus.environ | count | (env or {})
        return launcher("./launch_train.sh", str(ranks), env=environ, **values)  # type: ignore[arg-type]

    yield start
    for launched in launcher.started:
        if launched.process.poll() is None:
            launched.process.kill()
            launched.process.wait()


@pytest.fixture
def start_script(
    gpus: NullGpus, project: Path, tmp_path: Path, token: str
) -> Callable[..., Launched]:
    """Starts this text as a script of the user on two ranks."""
    launcher = Launcher(project, tmp_path, token)

    def start(
        text: str, *args: str, env: Mapping[str, str] | None = None, **flags: object
    ) -> Launched:
        (tmp_path / "script.py").write_text(text)
        folders = {"out_dir": tmp_path / "experiments", "log_dir": tmp_path / "logs"}
        own = {"run_name": "script"} | folders | flags
        words = [*(f"--{k}={v}" for k, v in own.items()), "--script", tmp_path / "script.py"]
        words += ["--", *args]
        counts = {"NULL_GPU_COUNT": "2", "FAKE_NVML_COUNT": "2"}
        return launcher(
            *("./launch_train.sh", "2", *map(str, words)),
            name="script", bare=True, env=gpus.environ | counts | dict(env or {}),
        )  # fmt: skip

    return start
