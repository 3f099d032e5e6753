"""The ranks of a watched command: which processes are ranks, and which ones start them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.unit import targets
from training.core.errors import UserError
from training.watchdog import discovery, wrapped
from training.watchdog.probes import procfs

# Starts PROGRAM (itself: Lightning) once for each of RANKS, and waits for it. SETS: the variables
# that the launcher sets. THREAD: name of a thread.
STARTS = """
import os, subprocess, sys, time

if "LOCAL_RANK" in os.environ and "PROGRAM" not in os.environ:
    time.sleep(1000)
if "THREAD" in os.environ:
    with open("/proc/self/comm", "w") as name:
        name.write(os.environ["THREAD"])
ranks = os.environ["RANKS"].split()
sets = os.environ.get("SETS", "RANK={0} LOCAL_RANK={0} LOCAL_WORLD_SIZE=2 WORLD_SIZE=2")
for rank in ranks:
    env = os.environ | dict(pair.split("=") for pair in sets.format(rank).split())
    subprocess.Popen([sys.executable, "-u", os.environ.get("PROGRAM", __file__)], env=env)
print("ready", flush=True)
time.sleep(1000)
"""
# Processes that METHOD starts, STARTED of two connected with each other as by torch's TCPStore, and
# a data-loader worker. `self`: the program is the first of the two.
SPAWNS = """
import multiprocessing, os, socket, sys, threading, time

def rank(number, port, settled):
    if number == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port.value = server.getsockname()[1]
            other = server.accept()[0]
    else:
        while not port.value:
            time.sleep(0.01)
        other = socket.create_connection(("127.0.0.1", port.value))
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as name:
        name.write(os.environ.get("THREAD", "pt_gloo_runloop"))
    settled.set()
    time.sleep(1000)

def worker(name):
    with open("/proc/self/comm", "w") as comm:
        comm.write(name)
    time.sleep(1000)

if __name__ == "__main__":
    method, count = os.environ["METHOD"], int(os.environ["STARTED"])
    context = multiprocessing.get_context("fork" if method == "self" else method)
    port, settled = context.Value("i", 0), [context.Event(), context.Event()]
    # inherited by every forked process
    with socket.create_server(("127.0.0.1", 0)) as server:
        to_itself = socket.create_connection(server.getsockname()), server.accept()
    many = [context.Process(target=rank, args=(one, port, settled[one])) for one in range(2)]
    others = [context.Process(target=worker, args=(name,)) for name in os.environ["OTHERS"].split()]
    if method == "self":
        threading.Thread(target=rank, args=(0, port, settled[0])).start()
        del many[0]
    for one in (*many[:count], *others):
        one.start()
    if count == 2:
        for one in settled:
            one.wait()
    print("ready", *([os.getpid()] if method == "self" else []), *(one.pid for one in many), flush=True)
    time.sleep(1000)
"""


def started(pid: int, count: int) -> list[int]:
    wait_until(lambda: len(found := procfs.family(pid)) == count and all(map(_ran, found)), 20)
    return procfs.family(pid)


def _ran(pid: int) -> bool:
    """After its exec, with its own variables."""
    return "LOCAL_RANK" in procfs.environment(pid)


@pytest.mark.parametrize(("itself", "platform"), [(False, False), (False, True), (True, False)])
def test_a_launcher_is_not_a_rank(tmp_path: Path, itself: bool, platform: bool) -> None:
    env = {"RANKS": "1"}
    if not itself:
        (tmp_path / "train.py").write_text("import time\ntime.sleep(1000)\n")
        env["PROGRAM"] = str(tmp_path / "train.py")
    if platform:  # as on Kubernetes: of the machine
        env |= {"RANK": "0", "WORLD_SIZE": "1"}
    with targets.running(tmp_path, STARTS, env=env) as (pid, _, _):
        (child,) = started(pid, 1)
        expected = {0: pid, 1: child} if itself else {1: child}  # rank 0 has ended
        assert discovery.started_by(pid) == (expected, 2, 2, 0)


# Variables of launchers that do not set LOCAL_WORLD_SIZE
LIGHTNING = "LOCAL_RANK={0} NODE_RANK=%s WORLD_SIZE=%s MASTER_ADDR=%s"
DEEPSPEED = "RANK=1{0} LOCAL_RANK={0} LOCAL_SIZE=3 WORLD_SIZE=30 MASTER_ADDR=a"
SHELL = "RANK={0} LOCAL_RANK={0} WORLD_SIZE=4 MASTER_ADDR=a"


@pytest.mark.parametrize(
    ("sets", "ranks", "numbers", "sizes"),
    [
        (LIGHTNING % (0, 4, "127.0.0.1"), "1 2 3", [0, 1, 2, 3], (4, 4, 0)),
        (LIGHTNING % (0, 4, "127.0.0.1"), "1", [0, 1], (4, 4, 0)),  # two have ended
        (LIGHTNING % (0, 8, "a"), "1 2 3", [0, 1, 2, 3], (4, 8, 4)),
        (LIGHTNING % (1, 8, "a"), "1 3", [4, 5, 7], (4, 8, 5)),
        (LIGHTNING % (1, 8, "a"), "1 2", [4, 5, 6], (4, 8, 5)),
        (DEEPSPEED, "0 1 2", [10, 11, 12], (3, 30, 0)),
        (DEEPSPEED, "1 2", [11, 12], (3, 30, 0)),
        (SHELL, "0 1", [0, 1], (2, 4, 2)),
        (SHELL, "0 1 2", [0, 1, 2], (3, 4, 1)),
    ],
)
def test_the_ranks_of_this_machine_among_those_of_several(
    tmp_path: Path, sets: str, ranks: str, numbers: list[int], sizes: tuple[int, int, int]
) -> None:
    env = {"RANKS": ranks, "SETS": sets}
    if sets in (DEEPSPEED, SHELL):
        (tmp_path / "train.py").write_text("import time\ntime.sleep(1000)\n")
        env["PROGRAM"] = str(tmp_path / "train.py")
    with targets.running(tmp_path, STARTS, env=env) as (pid, _, _):
        pids = started(pid, len(ranks.split()))
        if "PROGRAM" not in env:  # its first rank is the program itself
            pids.insert(0, pid)
        assert discovery.started_by(pid) == (dict(zip(numbers, pids, strict=True)), *sizes)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver", "self"])
def test_ranks_without_variables_are_found_by_their_connections(
    tmp_path: Path, method: str
) -> None:
    env = {"METHOD": method, "STARTED": "2", "OTHERS": "pt_data_worker pt_data_worker"}
    with targets.running(tmp_path, SPAWNS, env=env) as (pid, _, output):
        expected = {rank: int(number) for rank, number in enumerate(output[1:])}
        wait_until(lambda: discovery.started_by(pid) == (expected, 2, 2, 0), 20)
        assert discovery.of_process(pid) == expected


# of the only rank of a training
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
NONE = discovery.Started({})


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver", "self"])
def test_the_only_rank_is_the_launcher_of_connected_ranks(tmp_path: Path, method: str) -> None:
    env = {"METHOD": method, "STARTED": "2", "OTHERS": "pt_data_worker pt_data_worker"}
    with targets.running(tmp_path, SPAWNS, env=env | ALONE) as (pid, _, output):
        expected = {rank: int(number) for rank, number in enumerate(output[1:])}
        wait_until(lambda: discovery.own_ranks(pid) == (expected, 2, 2, 0), 20)
        assert discovery.of_process(pid) == discovery.of_process(expected[1]) == expected


@pytest.mark.parametrize(
    ("started", "thread"), [("1", "pt_gloo_runloop"), ("2", "grpc_server"), ("0", "python")]
)
def test_other_processes_below_the_only_rank_are_not_ranks(
    tmp_path: Path, started: str, thread: str
) -> None:
    """Workers, which inherit its variables; a server and its client."""
    env = {"METHOD": "fork", "STARTED": started, "OTHERS": "python python", "THREAD": thread}
    with targets.running(tmp_path, SPAWNS, env=env | ALONE) as (pid, _, _):
        for settled in (False, True):
            assert discovery.own_ranks(pid, settled) == NONE
        assert discovery.of_process(pid) == {0: pid}


@pytest.mark.parametrize(
    ("ranks", "more", "found"),
    [
        ("0 1", {}, [0, 1]),
        ("0", {}, []),  # an evaluation
        ("0 1", {"WORLD_SIZE": "2"}, []),  # the launcher is one of several ranks
        ("0 1", {"THREAD": "pt_gloo_runloop"}, []),  # it trains itself
        ("0 1 0 1", {}, []),  # two trainings
    ],
)
def test_the_only_rank_is_the_launcher_of_ranks_with_other_variables(
    tmp_path: Path, ranks: str, more: dict[str, str], found: list[int]
) -> None:
    program = tmp_path / "train.py"
    program.write_text("import time\ntime.sleep(1000)\n")
    env = {"RANKS": ranks, "PROGRAM": str(program), **ALONE, **more}
    with targets.running(tmp_path, STARTS, env=env) as (pid, _, _):
        pids = started(pid, len(ranks.split()))
        wait_until(lambda: all(procfs.program(one) == "train.py" for one in pids), 20)
        assert list(discovery.own_ranks(pid).ranks) == found
        if found:
            assert discovery.own_ranks(pid) == (dict(enumerate(pids)), 2, 2, 0)
            assert discovery.of_process(pid) == dict(enumerate(pids))
        elif ranks == "0 1 0 1":
            with pytest.raises(UserError) as caught:
                discovery.of_process(pid)
            assert caught.value.problems[0].code == "process.several"


@pytest.mark.parametrize("method", ["fork", "self"])
def test_unconnected_processes_are_left_out_after_a_while(tmp_path: Path, method: str) -> None:
    env = {"METHOD": method, "STARTED": "2", "OTHERS": "python"}
    with targets.running(tmp_path, SPAWNS, env=env) as (pid, _, output):
        assert discovery.started_by(pid) == ({}, 0, 0, 0)
        expected = {rank: int(number) for rank, number in enumerate(output[1:])}
        assert discovery.started_by(pid, settled=True) == (expected, 2, 2, 1)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_without_connections_are_not_ranks(tmp_path: Path, method: str) -> None:
    env = {"METHOD": method, "STARTED": "1", "OTHERS": "python python"}
    with targets.running(tmp_path, SPAWNS, env=env) as (pid, _, output):
        targets.asleep(int(output[1]), "accept")
        for settled in (False, True):
            assert discovery.started_by(pid, settled) == ({}, 0, 0, 0)


def test_the_training_beside_a_helper_is_the_rank(tmp_path: Path) -> None:
    """In a shell script; both are Python, and one has loaded torch."""
    library = tmp_path / "libtorch_cpu.so"
    library.write_bytes(bytes(4096))
    (tmp_path / "helper.py").write_text("input()\n")
    (tmp_path / "train.py").write_text(
        f"import mmap\nfile = open({str(library)!r})\n"
        "kept = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "print('ready', flush=True)\ninput()\n"
    )
    python = f"'{sys.executable}' '{tmp_path}"
    shell = f"exec 3<&0; {python}/helper.py' <&3 & {python}/train.py' <&3 & wait"
    with subprocess.Popen(
        ["sh", "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout and process.stdout.readline() == b"ready\n"
            wait_until(lambda: sum(map(procfs.is_python, procfs.family(process.pid))) == 2, 20)
            found = discovery.python_of(process.pid)
            assert procfs.program(found) == "train.py"
            (helper,) = {*procfs.family(process.pid)} - {found}
            assert discovery.python_of(helper) == helper
        finally:
            for pid in (*procfs.family(process.pid), process.pid):
                os.kill(pid, signal.SIGKILL)


# A wrapper that starts itself as the training, which has torch's library and a process group.
# WRAPPER_HAS: the wrapper has loaded torch too. LOCAL_RANK as a launcher sets it.
WRAPS = """
import mmap, os, subprocess, sys, threading

training = "train" in sys.argv
if training or "WRAPPER_HAS" in os.environ:
    with open(os.environ["LIBRARY"]) as file:
        kept = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
if not training:
    subprocess.run([sys.executable, __file__, "train"])
with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as name:
    name.write("pt_gloo_runloop")
print("ready", os.getpid(), flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("loads", [False, True])
def test_the_training_below_a_python_wrapper_is_the_rank(tmp_path: Path, loads: bool) -> None:
    library = tmp_path / "libtorch_cpu.so"
    library.write_bytes(bytes(4096))
    env = {"LIBRARY": str(library), "RANK": "0", "LOCAL_RANK": "0"}
    env |= {"WRAPPER_HAS": "1"} if loads else {}
    with targets.running(tmp_path, WRAPS, env=env) as (pid, _, output):
        training = int(output[1])
        assert wrapped.TrainingProcesses().of({0: pid}) == {0: training}
        assert discovery.of_process(pid) == {0: training}
        # which Lightning's first rank has started
        assert wrapped.trainings({0: pid, 1: training}) == {0: pid, 1: training}


def test_the_training_of_a_wrapper_is_found_when_it_starts_or_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    library = tmp_path / "libtorch_cpu.so"
    library.write_bytes(bytes(4096))
    wrapper = (
        "import subprocess, sys\nprint('ready', flush=True)\nwhile sys.stdin.readline():\n"
        "    training = subprocess.Popen([sys.executable, sys.argv[1], 'train'])\n"
        "    sys.stdin.readline()\n    training.kill()\n    training.wait()\n"
        "    print('gone', flush=True)\n"
    )
    script = tmp_path / "train.py"
    script.write_text(WRAPS)
    env = os.environ | {"LIBRARY": str(library)}
    words = [sys.executable, "-c", wrapper, str(script)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdin and process.stdout and process.stdout.readline() == "ready\n"
        watch = wrapped.TrainingProcesses()
        assert watch.of({0: process.pid}) == {0: process.pid}
        for _ in range(2):
            print("start", file=process.stdin, flush=True)
            training = int(process.stdout.readline().split()[1])
            clock[0] += wrapped.SETTLE_S
            assert watch.of({0: process.pid}) == {0: training}
            print("stop", file=process.stdin, flush=True)
            assert process.stdout.readline() == "gone\n"
        clock[0] += wrapped.SEARCH_S
        assert watch.of({0: process.pid}) == {0: process.pid}
        process.stdin.close()


def test_a_rank_that_joins_its_group_after_a_child_is_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may start an engine with a process group of its own before its init_process_group."""
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    joined = set[int]()
    monkeypatch.setattr("training.watchdog.spawned.in_group", lambda pid: pid in joined)
    library = tmp_path / "libtorch_cpu.so"
    library.write_bytes(bytes(4096))
    env = {"LIBRARY": str(library), "WRAPPER_HAS": "1"}
    with targets.running(tmp_path, WRAPS, env=env) as (pid, _, output):
        engine, watch = int(output[1]), wrapped.TrainingProcesses()

        def found() -> int:
            clock[0] += wrapped.SETTLE_S
            return watch.of({0: pid})[0]

        assert found() == pid
        joined.add(engine)
        assert found() == engine
        joined.add(pid)
        assert found() == pid
        joined.discard(pid)
        assert found() == pid, "it has left its group, and the engine works for it"


def test_the_search_below_a_shell_ends_when_the_rank_has_joined_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, joined = [1000.0], set[int]()
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("training.watchdog.spawned.in_group", lambda pid: pid in joined)
    library, script = tmp_path / "libtorch_cpu.so", tmp_path / "train.py"
    library.write_bytes(bytes(4096))
    script.write_text(WRAPS)
    shell = ["sh", "-c", f"'{sys.executable}' '{script}'; :"]
    starts = f"import subprocess\nsubprocess.run({shell!r})\n"
    env = {"LIBRARY": str(library), "WRAPPER_HAS": "1"}
    with targets.running(tmp_path, starts, env=env) as (pid, _, output):
        first, rank, engine = procfs.family(pid)
        assert engine == int(output[1]) and not procfs.is_python(first)
        watch = wrapped.TrainingProcesses()

        def found() -> int:
            clock[0] += wrapped.SETTLE_S
            return watch.of({0: first})[0]

        joined.add(engine)
        assert found() == engine
        joined.add(rank)
        assert found() == rank
        with monkeypatch.context() as patch:  # the target is ended by its family
            patch.setattr(procfs, "tree", dict)
            assert found() == rank, "no further search"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["-u", "-X", "dev", "SCRIPT"], "SCRIPT"),
        (["-Wignore", "SCRIPT", "-m", "x"], "SCRIPT"),
        (["-um", "pdb", "SCRIPT"], "pdb"),
        (["-c", "input()"], ""),
    ],
)
def test_the_program_of_a_python(tmp_path: Path, words: list[str], name: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("input()\n")
    command = [sys.executable, *(str(script) if word == "SCRIPT" else word for word in words)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: procfs.command(process.pid).startswith(sys.executable), 10)
        assert procfs.program(process.pid) == name.replace("SCRIPT", script.name)
        process.kill()
