"""GPU inventory through the real NVML client, with a fake driver library."""

from __future__ import annotations

import getpass
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import each
from tests.unit.conftest import clean_environment, python
from tests.unit.nvidia_machine import BALANCED, UUID, Nvidia, dry_run, look
from training.core.messages import msg
from training.host import gpus, nvml, visible_devices
from training.host.gpus import Gpu, GpuInventory, visible
from training.tasks.gpt import memory

GIB = 1 << 30


def test_two_gpus_with_all_facts(nvidia: Nvidia) -> None:
    machine = look(nvidia(COUNT=2, FREE_GIB="31,5", CAPABILITY="9.0"))
    assert (machine.reason, machine.driver, machine.cuda) == (
        "2 GPUs on this machine",
        "580.65.06",
        "13.0",
    )
    first, second = machine.gpus
    assert (first.index, first.uuid, first.name) == (0, UUID.format(0), "Fake GPU 0")
    assert (first.total_bytes, first.free_bytes, second.free_bytes) == (32 * GIB, 31 * GIB, 5 * GIB)
    assert (second.index, second.use_percent, second.temperature_c, second.power_w) == (
        1,
        11,
        41,
        75.501,
    )
    assert tuple(first.capability or ()) == (9, 0)
    assert tuple(first.processes) == ()


def test_the_numa_node_of_a_gpu_is_the_kernel_s(nvidia: Nvidia, tmp_path: Path) -> None:
    for bus, node in (("0000:3a:00.0", 1), ("0000:3b:00.0", -1)):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "numa_node").write_text(f"{node}\n")
    code = (
        "import sys; from pathlib import Path; from training.host import gpus;"
        "gpus.PCI_DEVICES = Path(sys.argv[1]);"
        "print([gpu.numa_node for gpu in gpus.inventory().gpus])"
    )
    assert python("-c", code, str(tmp_path), **nvidia(COUNT=3)).stdout == "[1, None, None]\n"
    unsupported = python("-c", code, str(tmp_path), **nvidia(COUNT=1, NOT_SUPPORTED=1))
    assert unsupported.stdout == "[None]\n"


def test_a_virtual_gpu_differs_from_one_that_is_passed_through(nvidia: Nvidia) -> None:
    found = look(nvidia(COUNT=3, VIRTUAL="0,1,2"))
    assert [gpu.virtual for gpu in found.gpus] == [False, False, True]
    (unknown,) = look(nvidia(COUNT=1, VIRTUAL=2, NOT_SUPPORTED=1)).gpus
    assert not unknown.virtual


@each(
    ("selection", "indices"),
    [
        ("0", [0]),
        ("2", [2]),
        ("2,0", [2, 0]),
        (" 1 , 0 ", [1, 0]),
        (UUID.format(1), [1]),
        ("GPU-000000a2", [2]),
        (f"{UUID.format(2)},0", [2]),
        (f"0,{UUID.format(2)}", [0]),
        (f"{UUID.format(2)},{UUID.format(0)}", [2, 0]),
        (f"{UUID.format(2)},MIG-0", [2]),
        ("GPU-000000a", []),
        ("0,,1", [0]),
        ("01,+0", [1, 0]),
        ("1gpu2,-1,0", [1]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("7", []),
        ("0,7,1", [0]),
        ("1,x", [1]),
        ("GPU-nosuch", []),
    ],
)
def test_cuda_visible_devices_as_cuda_reads_it(selection: str, indices: list[int]) -> None:
    every = [Gpu(n, UUID.format(n), "x", None, None, None, None, None) for n in range(3)]
    chosen, reason = visible(every, selection)
    assert [g.index for g in chosen] == indices
    assert reason == f"{len(indices)} of 3 by CUDA_VISIBLE_DEVICES={selection!r}"
    assert visible(every, None) == (every, msg("host.gpus.on_machine", gpus="3 GPUs"))


@each("selection", ["0,0", "0,1,1", "0,00", "7,7", f"{UUID.format(1)},{UUID.format(1)}"])
def test_a_gpu_that_is_named_twice_hides_all(selection: str) -> None:
    every = [Gpu(n, UUID.format(n), "x", None, None, None, None, None) for n in range(3)]
    chosen, reason = visible(every, selection)
    assert chosen == []
    assert reason == (
        f"0 of 3 by CUDA_VISIBLE_DEVICES={selection!r}: CUDA shows none if the list names a GPU twice"
    )
    assert visible(every, f"{UUID.format(1)},GPU-000000a1")[0] == [], "by a part of its UUID"


@each(
    "selection",
    [
        *(
            "0",
            "0,1",
            " 1 , 0 ",
            "2,0,1",
            "0,,1",
            ",0",
            "",
            "-1",
            "0,-1,0",
            "x",
            "1,x,0",
            "NoDevFiles",
        ),
        *("01,+2", "1gpu2,2ampere", "-0", "0,0", "0,1,1", "0,00", "7,7", "0,7,0", "0,GPU-a1"),
        *("GPU-a", "GPU-a,GPU-b", "GPU-a, GPU-b", "GPU-a,0", "GPU-a,MIG-b", "GPU-a,GPU-a", "GPU-"),
        *("MIG-a", "MIG-a,MIG-b", "MIG-a,GPU-b", "MIG-a,0", "MIG-a,MIG-a", " GPU-a", "gpu-a"),
    ],
)
def test_cuda_visible_devices_as_torch_reads_it(
    selection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", selection)
    named = visible_devices.entries(selection)
    assert (named if len(set(named)) == len(named) else []) == torch.cuda._parse_visible_devices()


@pytest.mark.parametrize(
    ("selection", "indices"), [(UUID.format(1), [1]), ("", []), ("1,0", [1, 0])]
)
def test_cuda_visible_devices_is_applied(
    selection: str, indices: list[int], nvidia: Nvidia
) -> None:
    machine = look(nvidia(CUDA_VISIBLE_DEVICES=selection))
    assert [g.index for g in machine.gpus] == indices
    assert repr(selection) in machine.reason


def test_unreported_facts_are_none_and_shown_as_a_dash(nvidia: Nvidia) -> None:
    gpu = look(nvidia(NOT_SUPPORTED=1)).gpus[0]
    assert gpu.name == "Fake GPU 0"
    assert {
        gpu.total_bytes,
        gpu.free_bytes,
        gpu.use_percent,
        gpu.temperature_c,
        gpu.power_w,
        gpu.capability,
    } == {None}
    assert memory.gib(gpu.free_bytes) == msg("core.units.unknown")
    done = dry_run(nvidia(NOT_SUPPORTED=1), BALANCED)
    assert done.returncode == 0
    unknown = msg("plan.gpus.free_unknown", shown="Fake GPU 0", occupied="")
    assert f"  {unknown}\n" in done.stdout
    assert "Traceback" not in done.stderr


def test_no_driver(tmp_path: Path) -> None:
    # An empty folder before the system libraries simulates a machine without the driver.
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    assert look({"LD_LIBRARY_PATH": str(tmp_path)}) == GpuInventory(
        (), "no NVIDIA driver on this machine"
    )


def test_a_driver_of_windows_that_is_not_on_the_path_of_the_loader(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "libnvidia-ml.so.1").touch()
    monkeypatch.setattr(gpus, "WSL_LIBRARY", tmp_path / "libnvidia-ml.so.1")
    monkeypatch.setattr(gpus.bare_nvml, "LIBRARY", "libno-such-library.so.1")
    path = f"{tmp_path}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
    assert gpus.inventory({}).reason.endswith(f"export LD_LIBRARY_PATH={path}")
    reason = gpus.inventory({"LD_LIBRARY_PATH": f"/cuda:{tmp_path}"}).reason
    assert "cannot be loaded: libno-such-library.so.1: cannot open" in reason


def test_a_driver_that_does_not_respond(nvidia: Nvidia) -> None:
    machine = look(nvidia(INIT=9))
    assert machine.gpus == ()
    assert machine.reason == "the NVIDIA driver does not answer: Driver Not Loaded"


def test_an_old_pynvml_lacks_functions_and_returns_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: b"Tesla V100")
    assert nvml.ask("nvmlDeviceGetName", None) == "Tesla V100"
    assert nvml.ask("nvmlOfALaterVersion", None) is None


def test_an_old_driver_names_the_processes_by_an_older_function(
    old_driver: dict[str, str], nvidia: Nvidia
) -> None:
    variables = nvidia(PROCESSES="4711:21.5;4712:1", MIG="0,1", MIG_GIB=10) | old_driver
    for selection, pids in (("0,1", [4711, 4712]), ("MIG-00000001", [4712])):
        found = look(variables | {"CUDA_VISIBLE_DEVICES": selection}).gpus
        processes = [one for gpu in found for one in gpu.processes]
        assert [one["pid"] for one in processes] == pids  # type: ignore[index]


def test_a_start_does_not_wait_for_a_driver_that_hangs(nvidia: Nvidia) -> None:
    code = (
        "import os; from training.host import gpus; gpus.SLOW_S, gpus.LIMIT_S = 0.1, 0.5;"
        "machine = gpus.inventory_at_start(os.environ); print(len(machine.gpus), machine.reason)"
    )
    done = python("-c", code, **nvidia(SLEEP=60))
    assert done.returncode == 0 and done.stdout.startswith("0 ") and "0 s" in done.stdout
    assert "[WARNING]" in done.stderr
    assert python("-c", code, **nvidia(COUNT=2)).stdout.startswith("2 ")


@each(
    ("facts", "use"),
    [
        ({"PERSISTENCE": 0}, [10, 11]),
        ({"PERSISTENCE": "0,1"}, [10, 99]),
        ({"PERSISTENCE": 0, "PROCESSES": "4711:1"}, [99, 11]),
        ({"PERSISTENCE": 0, "USE": "97,3"}, [97, 3]),  # processes of others, from a container
    ],
)
def test_the_load_of_the_driver_does_not_make_a_gpu_busy(
    facts: dict[str, object], use: list[int], nvidia: Nvidia
) -> None:
    code = (
        "import os; from training.host import gpus;"
        "print([gpu.use_percent for gpu in gpus.inventory_at_start(os.environ).gpus])"
    )
    done = python("-c", code, **nvidia(COUNT=2, USE_AT_FIRST=99, **facts))
    assert done.stdout == f"{use}\n"


def test_a_driver_without_gpus(nvidia: Nvidia) -> None:
    machine = look(nvidia(COUNT=0))
    assert (machine.gpus, machine.reason) == ((), msg("host.gpus.on_machine", gpus="0 GPUs"))


def test_processes_on_a_busy_gpu(nvidia: Nvidia) -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", "another user's training"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=clean_environment()) as other:
        variables = nvidia(PID=other.pid, FREE_GIB="31")
        # Popen returns after exec, so the command line is that of the program.
        process = look(variables).gpus[0].processes[0]
        facts = process if isinstance(process, dict) else vars(process)
        assert (facts["pid"], facts["used_bytes"], facts["user"]) == (
            other.pid,
            GIB,
            getpass.getuser(),
        )
        assert facts["command"].startswith(f"{sys.executable} -c")
        shown = dry_run(variables, BALANCED)
        assert shown.returncode == 0
        assert (
            f"occupied by pid {other.pid} ({getpass.getuser()}, 1.0 GiB): {sys.executable} -c"
            in shown.stdout
        )
        full = dry_run(nvidia(PID=other.pid, FREE_GIB="3,31"), BALANCED)
        assert full.returncode == 3
        assert f"try: kill {other.pid}   # if it is yours: {sys.executable}"[:60] in full.stdout
        other.stdin.close()  # type: ignore[union-attr]


def test_command_lines_of_other_processes_are_escaped(nvidia: Nvidia) -> None:
    # It is part of a line to paste: a line break would start another command, an escape sequence
    # would move the cursor.
    command = [sys.executable, "-c", "import sys\nsys.stdin.read()", "\x1b[2J", "\r\n rm"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=clean_environment()) as other:
        (process,) = look(nvidia(PID=other.pid)).gpus[0].processes
        facts = process if isinstance(process, dict) else vars(process)
        other.stdin.close()  # type: ignore[union-attr]
    assert facts["command"].startswith(sys.executable)
    assert facts["command"].isprintable()


def test_a_process_of_another_container_is_shown_by_its_pid(nvidia: Nvidia) -> None:
    pid = int(Path("/proc/sys/kernel/pid_max").read_text())  # an unused PID
    (process,) = look(nvidia(PID=pid)).gpus[0].processes
    facts = process if isinstance(process, dict) else vars(process)
    assert (facts["pid"], facts["user"], facts["command"]) == (pid, "-", "-")
