"""Small generated packages, and an index that can pause: real venv and pip, no
network, no gigabytes."""

from __future__ import annotations

import contextlib
import functools
import threading
import zipfile
from collections import Counter
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from types import TracebackType

TORCH = "2.13.0"
# Everything that requirements.in names: version, and None for a module that only has to exist;
# the plan uses the others.
PACKAGES = {
    "torch": TORCH,
    "numpy": "2.0",
    "tqdm": "4.0",
    "wandb": "0.31.0",
    "tensorboard": "2.0",
    "pillow": "13.0",
    "psutil": None,
    "nvidia-ml-py": None,
    "py-spy": "0.4",
    "google-re2": "1.1",
    "vl-convert-python": "1.9",
}


def fake_torch(version: str = TORCH) -> dict[str, bytes]:
    """Files of a package that looks like torch from outside."""
    text = (
        f"from typing import Optional\n\n__all__ = ['__version__']\n__version__ = "
        f"'{version}'\ndebug = False\n"
    )
    return {
        "torch/__init__.py": b"from .version import __version__\n",
        "torch/version.py": text.encode(),
        "torch/_C.so": b"",
    }


def metadata_files(name: str, version: str) -> dict[str, bytes]:
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    return {
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{folder}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: "
        b"py3-none-any\n",
    }


def unpack(folder: Path, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def write_wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> None:
    underscored = name.replace("-", "_")
    content = files | metadata_files(name, version)
    record = f"{underscored}-{version}.dist-info/RECORD"
    with zipfile.ZipFile(folder / f"{underscored}-{version}-py3-none-any.whl", "w") as wheel:
        for path, data in content.items():
            wheel.writestr(path, data)
        wheel.writestr(record, "".join(f"{path},,\n" for path in [*content, record]))


def write_all(folder: Path) -> str:
    """Wheels of PACKAGES; the lock file that wants them."""
    lock = []
    for name, wanted in PACKAGES.items():
        if wanted is None:  # as installed here
            version, files = metadata.version(name), {}
            for path in metadata.files(name) or []:
                if (
                    ".dist-info" not in str(path)
                    and path.suffix != ".pyc"
                    and ".." not in path.parts
                ):
                    files[str(path)] = path.read_binary()
        else:
            version = wanted
            files = (
                fake_torch() if name == "torch" else {f"{name.replace('-', '_')}/__init__.py": b""}
            )
        write_wheel(folder, name, version, files)
        lock.append(f"{name}=={version}\n")
    return "# a comment\n" + "".join(lock)


class Index:
    """The wheels by HTTP on the loopback. A download of `gated` waits for open(); `asked` is set
    when one does."""

    def __init__(self, folder: Path, gated: str) -> None:
        self.asked, self._gate, self.downloads = (
            threading.Event(),
            threading.Event(),
            Counter[str](),
        )
        outer = self

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.rpartition("/")[2].partition("-")[0]
                outer.downloads[name] += 1
                if name == gated:
                    outer.asked.set()
                    outer._gate.wait(120)
                # the test kills the client
                with contextlib.suppress(OSError):
                    super().do_GET()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
        )
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"

    def open(self) -> None:
        self._gate.set()

    def __enter__(self) -> Index:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.open()
        self._server.shutdown()
        self._server.server_close()
