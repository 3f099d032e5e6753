"""What reports quote of the kernel's log, and the command where it may not be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.communication_outcomes import ended, find, hung
from training.host import gpu_processes, gpus, kernel_log, kernel_quotes
from training.host.gpus import Gpu
from training.host.kernel_log import KernelLog
from training.launcher.communication import kernel, stages
from training.launcher.communication.analysis import analyze
from training.launcher.communication.result import KILLS, CommunicationResult
from training.plan.preflight import gpu_health
from training.plan.preflight.gpu_state import State

Logged = Callable[..., None]
XID = "NVRM: Xid (PCI:0000:{bus}:00): 79, pid=1, GPU has fallen off the bus."
IOMMU = "DMAR: [DMA Read] Request device [5e:00.0] fault addr 0xffe00000"
LINK = "pcieport 0000:{bus}:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer"
OOM = "Out of memory: Killed process {pid} (python3) total-vm:1kB, anon-rss:1kB"
SLOW = State(0, (), 0, None, None, 16, 16, 1, 4, None, None, use_percent=90, bus=("0000:5e:00.0",))


@pytest.fixture
def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Logged:
    """Writes the kernel's log; None: it may not be read."""
    monkeypatch.setattr(kernel_log, "KMSG", tmp_path / "kmsg")
    monkeypatch.setenv("PATH", str(tmp_path))
    kernel_quotes.of_silent_gpus.cache_clear()

    def write(*lines: str) -> None:
        text = "".join(f"4,{n},0,-;{line}\n" for n, line in enumerate(lines))
        kernel_log.KMSG.write_text(text)

    return write


def test_the_newest_messages_since_the_boot_are_quoted(logged: Logged) -> None:
    lines = [XID.format(bus=f"0{n}") for n in range(5)]
    logged("NVRM: loading NVIDIA UNIX x86_64 Kernel Module", *lines, "eth0: link up")
    found = kernel_quotes.of_driver()
    assert (found.lines, found.commands) == (tuple(lines[-kernel_quotes.SHOWN :]), [])
    assert lines[-1] in found.newest and "dmesg" not in found.newest


def test_a_silent_gpu_has_no_messages_of_others(logged: Logged) -> None:
    working = [Gpu(0, "GPU-0", "x", None, None, None, None, None, pci="0000:5e:00.0")]
    logged(XID.format(bus="5e"), XID.format(bus="af"))
    assert gpus.silent_quotes(working).lines == (XID.format(bus="af"),)


def test_where_the_log_may_not_be_read_the_command_is_shown(logged: Logged) -> None:
    for found in (
        gpus.silent_quotes([]),
        kernel_quotes.of_driver(),
        kernel_quotes.of_iommu(),
        kernel_quotes.of_link(SLOW.bus),
    ):
        assert found.lines == () and found.newest == found.command
        assert found.command.startswith("sudo dmesg | grep ")


def test_errors_of_a_slow_link(logged: Logged) -> None:
    (check,) = gpu_health.health(SLOW)
    assert any("dmesg" in fix for fix in check.fixes)
    logged(LINK.format(bus="af"), LINK.format(bus="5e"))
    (check,) = gpu_health.health(SLOW)
    assert check.text.endswith(LINK.format(bus="5e")) and LINK.format(bus="af") not in check.text
    assert not any("dmesg" in fix for fix in check.fixes)


def shown(device: str, backend: str, outcome: kernel.CommunicationOutcome, log: KernelLog) -> str:
    """The whole check of a failed test."""
    finding = analyze(outcome, device)
    quotes = kernel.consult(outcome, finding, log, backend)
    assert quotes is not None
    (check,) = CommunicationResult(2, device, backend, finding, kernel=quotes).checks()
    return "\n".join([check.text, *check.fixes])


def test_a_driver_that_does_not_answer(logged: Logged) -> None:
    outcome = hung(stages.GPU, stages.GPU)
    assert "sudo dmesg | grep -i nvrm" in shown("cuda", "nccl", outcome, KernelLog())
    logged(XID.format(bus="5e"))
    text = shown("cuda", "nccl", outcome, KernelLog())
    assert XID.format(bus="5e") in text and "dmesg" not in text


def test_an_iommu_that_has_logged_faults(logged: Logged) -> None:
    large = stages.collective("all_reduce", stages.LARGE_BYTES["cuda"])
    outcome = hung(large, large)
    assert "sudo dmesg | grep -i -e IOMMU" in shown("cuda", "nccl", outcome, KernelLog())
    logged("pci 0000:5e:00.0: Adding to iommu group 3", IOMMU)
    text = shown("cuda", "nccl", outcome, KernelLog())
    assert text.count(IOMMU) == 1 and "iommu=pt" in text and "dmesg" not in text
    logged("pci 0000:5e:00.0: Adding to iommu group 3")
    text = shown("cuda", "nccl", outcome, KernelLog())
    assert "iommu=pt" not in text and "dmesg" not in text


def test_a_killed_rank(logged: Logged, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pids").symlink_to(gpu_processes.HOST_PIDS)
    monkeypatch.setattr(gpu_processes, "PIDS", tmp_path / "pids")
    outcome = ended(1, -9, records={0: {"error": "Connection closed by peer", "time": 50.0}})
    outcome.pids = {4100: 0, 4101: 1}
    assert find(outcome).killed
    assert KILLS in shown("cpu", "gloo", outcome, KernelLog())
    logged("before")
    for pid, of_memory in ((4101, True), (4242, False)):
        log = KernelLog()
        with kernel_log.KMSG.open("a") as file:
            file.write(f"4,9,0,-;{OOM.format(pid=pid)}\n")
        text = shown("cpu", "gloo", outcome, log)
        assert (OOM.format(pid=pid) in text, "free -h" in text) == (of_memory, of_memory)
        assert KILLS not in text
    (tmp_path / "pids").unlink()
    (tmp_path / "pids").symlink_to("pid:[4026532001]")
    assert KILLS in shown("cpu", "gloo", outcome, KernelLog()), "the kernel has other PIDs"
