"""What lib/run_script.py and training/trainer/flight_recorder_server.py do in a user's process:
nothing that its script could notice."""

from __future__ import annotations

import os
import runpy
import signal
import stat
import sys
import textwrap
import types
import zipfile
from pathlib import Path

import pytest

from tests.unit.conftest import python
from training.core import rundir
from training.trainer import flight_recorder_server

RUN_SCRIPT = Path(__file__).parents[2] / "lib/run_script.py"
PROGRAM = """
import importlib, importlib.util, runpy, sys
run_script = runpy.run_path({path!r})
class Next:
    names = []
    def find_spec(self, name, path=None, target=None):
        self.names.append(name)
finder, later = run_script["_AtDistributed"]({folder!r}, 3), Next()
sys.meta_path[:0] = [finder, later]
served = []
class Loader:
    def exec_module(self, module):
        module.serve = serve
    def create_module(self, spec):
        return None
def serve(folder, rank):
    served.append((str(folder), rank))
    {ends}
importlib.util.spec_from_file_location = lambda name, file: importlib.util.spec_from_loader(name, Loader())
for _ in range(2):
    try:
        importlib.import_module("torch.distributed.distributed_c10d")
    except ModuleNotFoundError:
        pass
    finder.find_spec("torch.distributed.distributed_c10d")
print(later.names.count("torch.distributed.distributed_c10d"), finder in sys.meta_path, served)
"""


@pytest.mark.parametrize(
    ("ends", "reason"),
    [("pass", ""), ("raise ValueError('of another torch')", "ValueError: of another torch")],
)
def test_an_import_is_watched_and_not_disturbed(tmp_path: Path, ends: str, reason: str) -> None:
    package = tmp_path / "torch/distributed"
    package.mkdir(parents=True)
    for name in ("../__init__.py", "__init__.py", "distributed_c10d.py"):
        (package / name).write_text("")
    program = textwrap.dedent(PROGRAM).format(path=str(RUN_SCRIPT), folder=str(tmp_path), ends=ends)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{program}"
    done = python("-c", program)
    assert (done.returncode, done.stdout) == (0, f"1 True [('{tmp_path}', 3)]\n"), done.stderr
    expected = f"rank 3: collectives cannot be inspected: {reason}\n" if reason else ""
    assert done.stderr == expected


def with_server(monkeypatch: pytest.MonkeyPatch, server: object) -> None:
    fake = types.ModuleType("torch._C._distributed_c10d")
    fake._WorkerServer = server  # type: ignore[attr-defined]
    for name in ("torch", "torch._C"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(flight_recorder_server, "_servers", [])
    monkeypatch.setattr(flight_recorder_server.atexit, "register", lambda *_: None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "RuntimeError"), ("\n", "RuntimeError"), ("no room\nat all", "no room")],
)
def test_why_there_is_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    def refuses(path: str) -> None:
        raise RuntimeError(text)

    with_server(monkeypatch, refuses)
    assert flight_recorder_server.serve(tmp_path, 0) == f"torch's control server: {reason}"


def test_other_users_may_not_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_server(monkeypatch, lambda path: os.mknod(path, stat.S_IFSOCK | 0o777))
    assert flight_recorder_server.serve(tmp_path, 0) == ""
    assert stat.S_IMODE(flight_recorder_server.address(tmp_path, 0).stat().st_mode) == 0o600


GROUP = """
import sys, types
distributed = sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")
distributed.is_initialized = lambda: True
"""
UNPRINTABLE = """
class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no text")

try:
    raise Odd
except Odd as error:
    raise Odd from error
"""
BAD_FILE = """
import io, sys, types
distributed = sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")
distributed.is_initialized = lambda: True
class Upload(io.RawIOBase):
    def writable(self):
        return True
    def flush(self):
        raise RuntimeError("the network is gone")
    def close(self):
        pass
upload = Upload()
print("trained")
"""
LAZY = """
import importlib.util, pathlib, sys, types
distributed = sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")
distributed.is_initialized = lambda: True
path = pathlib.Path(__file__).with_name("heavy.py")
path.write_text("raise ImportError('no libsox')")
spec = importlib.util.spec_from_file_location("heavy", path)
spec.loader = importlib.util.LazyLoader(spec.loader)
heavy = sys.modules["heavy"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(heavy)  # imported at the first use, which never comes
"""


@pytest.mark.parametrize(("text", "status"), [(UNPRINTABLE, 1), (BAD_FILE, 0), (LAZY, 0)])
def test_odd_objects_of_a_script_change_nothing(tmp_path: Path, text: str, status: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    plain, run = python(str(script)), python(str(RUN_SCRIPT), str(tmp_path), str(script))
    assert (run.returncode, run.stdout, run.stderr) == (status, plain.stdout, plain.stderr)
    record = rundir.read_json(tmp_path / "rank0.error.json")
    assert (record["type"] if record else "") == ("Odd" if status else "")


LEFT_OPEN = """
import os, sys, zipfile
import torch.distributed as dist
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
if "group" in sys.argv:
    dist.init_process_group("gloo")
%s
"""
ARCHIVE = """
import sys, zipfile
archive = zipfile.ZipFile(sys.argv[1], "w")
archive.writestr("result", "done")
"""


@pytest.mark.parametrize("group", ["group", ""])
@pytest.mark.parametrize("imported", [False, True])
def test_an_archive_that_was_left_open_is_complete(
    tmp_path: Path, group: str, imported: bool
) -> None:
    script, archive = tmp_path / "train.py", tmp_path / "result.zip"
    (tmp_path / "results.py").write_text(ARCHIVE)
    script.write_text(LEFT_OPEN % ("import results" if imported else ARCHIVE))
    run = python(str(RUN_SCRIPT), str(tmp_path), str(script), str(archive), group)
    assert run.returncode == 0, run.stderr
    with zipfile.ZipFile(archive) as made:
        assert made.read("result") == b"done"


DESTRUCTOR = """
import json, os, sys, weakref
import torch.distributed as dist
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
dist.init_process_group("gloo")
TARGET, ROUND = sys.argv[1], {"ndigits": 2}

class Results:
    def __init__(self):
        self.losses = [0.123]
    def __del__(self):
        with open(TARGET, "w") as file:
            json.dump([round(loss, **ROUND) for loss in self.losses], file)

results = Results()
gone = weakref.proxy({1})
"""


def test_a_destructor_finds_what_it_uses(tmp_path: Path) -> None:
    script, target = tmp_path / "train.py", tmp_path / "result"
    script.write_text(DESTRUCTOR)
    run = python(str(RUN_SCRIPT), str(tmp_path), str(script), str(target))
    assert (run.returncode, run.stderr) == (0, "")
    assert target.read_text() == "[0.12]"


@pytest.mark.parametrize(
    ("code", "status"), [("None", 0), ("0", 0), ("{}", 1), ("''", 1), ("7", 7), ("75", 75)]
)
def test_the_status_of_sys_exit(tmp_path: Path, code: str, status: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import sys\n{GROUP}sys.exit({code})\n")
    run = python(str(RUN_SCRIPT), str(tmp_path), str(script))
    assert run.returncode == status
    assert (tmp_path / "rank0.ended").exists() == (status in (0, 75))


CAUGHT = """
import sys

def train():
    raise ValueError("bad sample")

try:
    train()
except Exception{name}:
    {ends}
"""


@pytest.mark.parametrize(
    ("name", "ends", "line"),
    [
        ("", "sys.exit(1)", 5),
        (" as error", "raise SystemExit(1) from error", 5),
        ("", "raise SystemExit(1) from None", 10),
        ("", "raise KeyError", 10),
    ],
)
def test_the_line_of_an_exception_that_was_caught_before_sys_exit(
    tmp_path: Path, name: str, ends: str, line: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(CAUGHT.format(name=name, ends=ends))
    python(str(RUN_SCRIPT), str(tmp_path), str(script))
    record = rundir.read_json(tmp_path / "rank0.error.json")
    code = script.read_text().splitlines()[line - 1].strip()
    assert record and (record["where"], record["code"]) == (f"{script}:{line}", code)


def test_the_line_of_sys_exit_after_an_exception_in_a_library(tmp_path: Path) -> None:
    """As argparse leaves after an error of its own."""
    script = tmp_path / "train.py"
    script.write_text(
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--n', type=int)\nparser.parse_args(['--n', 'x'])\n"
    )
    python(str(RUN_SCRIPT), str(tmp_path), str(script))
    record = rundir.read_json(tmp_path / "rank0.error.json")
    assert (
        record and record["before"] and (record["message"], record["where"]) == ("2", f"{script}:4")
    )


def test_a_keyboard_interrupt_runs_the_functions_at_exit(tmp_path: Path) -> None:
    """multiprocessing waits there for the ranks that the script has started."""
    script = tmp_path / "train.py"
    script.write_text("import atexit\natexit.register(print, 'saved')\nraise KeyboardInterrupt\n")
    plain, run = python(str(script)), python(str(RUN_SCRIPT), str(tmp_path), str(script))
    assert (run.returncode, run.stdout) == (plain.returncode, plain.stdout)
    assert (run.returncode, run.stdout) == (-signal.SIGINT, "saved\n")
    assert (rundir.read_json(tmp_path / "rank0.error.json") or {})["type"] == "KeyboardInterrupt"


def test_a_keyboard_interrupt_loses_no_buffered_line(tmp_path: Path) -> None:
    script, out = tmp_path / "train.py", tmp_path / "out.csv"
    script.write_text(
        "full = open('/dev/full', 'w'); full.write('lost')\n"
        f"file = open({str(out)!r}, 'w'); file.write('row')\n"
        "raise KeyboardInterrupt\n"
    )
    run = python(str(RUN_SCRIPT), str(tmp_path), str(script))
    assert (run.returncode, out.read_text()) == (-signal.SIGINT, "row")


def test_the_process_of_mp_spawn_that_has_failed_is_recorded(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("class Exited(Exception):\n    error_pid = 4711\nraise Exited\n")
    python(str(RUN_SCRIPT), str(tmp_path), str(script))
    assert (rundir.read_json(tmp_path / "rank0.error.json") or {})["pid"] == 4711


FORKS = """
import os, sys
child = os.fork()
if child:
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), os.listdir(sys.argv[1]), flush=True)
    os.abort()
"""


@pytest.mark.parametrize("leaves", ["", "else:\n    sys.exit(0)\n"])
def test_the_end_of_a_forked_child_is_not_the_end_of_the_rank(tmp_path: Path, leaves: str) -> None:
    script, ranks = tmp_path / "train.py", tmp_path / "ranks"
    script.write_text(FORKS + leaves)
    ranks.mkdir()
    run = python(str(RUN_SCRIPT), str(ranks), str(script), str(ranks))
    assert (run.returncode, run.stdout) == (-signal.SIGABRT, "0 ['rank0.stacks']\n"), run.stderr


@pytest.mark.parametrize("file", ["inspector.py", "lightning.py", "transformers.py"])
def test_an_error_of_the_inspector_is_where_the_training_called_it(file: str) -> None:
    run_script = runpy.run_path(str(RUN_SCRIPT))
    of_duet: dict[str, object] = {}
    inside = str(RUN_SCRIPT.parents[1] / "training/inspector" / file)
    exec(compile("def step(): raise ValueError('planted')", inside, "exec"), of_duet)
    with pytest.raises(ValueError, match="planted") as caught:
        of_duet["step"]()  # type: ignore[operator]
    assert run_script["_where"]("main.py", caught.value).startswith(f"{__file__}:")


def test_an_error_of_executed_text_is_where_the_script_executes_it() -> None:
    """As of `exec(open("configurator.py").read())`."""
    run_script = runpy.run_path(str(RUN_SCRIPT))
    with pytest.raises(ValueError, match="planted") as caught:
        exec("raise ValueError('planted')")
    line = caught.traceback[0].lineno + 1
    assert run_script["_where"]("main.py", caught.value) == f"{__file__}:{line}"
