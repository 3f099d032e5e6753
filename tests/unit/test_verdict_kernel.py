"""Verdicts with the kernel's messages."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, cast

import pytest

from tests.unit.verdicts import finding, new_run, plan, report_error, verdict
from training.core.contracts.plan import Plan
from training.core.contracts.verdict import FailureRecord
from training.core.rundir import RunDir, write_json
from training.diagnose import card, signatures
from training.diagnose.advice import filled
from training.host import cgroups, gpu_processes, kernel_log
from training.host.kernel_log import KernelLog
from training.launcher import failed_gpus, failure_report, recovery_policy
from training.launcher.outcome import Outcome
from training.launcher.restart import Failure, GiveUp

PIDS = {0: 4100, 1: 4101}
OTHER = 9000
GPUS = [
    {"index": n, "uuid": f"GPU-{n}", "name": "Card", "pci": f"0000:{bus}:00.0"}
    for n, bus in enumerate(("3b", "5e"))
]
OOM = (
    "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,"
    "task_memcg=/user.slice,task=python,pid={pid},uid=0\n"
    "Out of memory: Killed process {pid} (python) total-vm:26184840kB, anon-rss:15370088kB, "
    "file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:38964kB oom_score_adj:0"
)
SEGFAULT = (
    "python[{pid}]: segfault at 75b800000034 ip 000075b86b22d5aa sp 00007ffef62526f0 error 4 "
    "in libmori_application.so[75b86b200000+c7000] likely on CPU 124 (core 84, socket 1)"
)
TRAP = (
    "traps: python[{pid}] general protection fault ip:7552a25149a2 sp:7551597fec50 error:0 "
    "in libc.so.6[289a2,7552a2514000+188000]"
)
LOST = (
    "NVRM: Xid (PCI:0000:{bus}:00): 79, pid='<unknown>', name=<unknown>, "
    "GPU has fallen off the bus."
)
MMU = (
    "NVRM: Xid (PCI:0000:{bus}:00): 31, pid={pid}, name=python, Ch 00000008, intr 00000000. "
    "MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f2e_2d800000"
)
BUS_ERROR = "nvidia 0000:{bus}:00.0: PCIe Bus Error: severity={severity}, type=Transaction Layer"
XID = "NVRM: Xid (PCI:0000:{bus}:00): {text}"
ABORT, KILL, SEGV = -signal.SIGABRT, -signal.SIGKILL, -signal.SIGSEGV


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(kernel_log, "KMSG", tmp_path / "kmsg")
    return run_with_pids(tmp_path)


def run_with_pids(folder: Path) -> RunDir:
    made = new_run(folder)
    ranks = [{"rank": rank, "pid": pid, "ticks": 1} for rank, pid in PIDS.items()]
    write_json(made.supervisor, {"pid": 1, "ranks": ranks})
    return made


def failed(run: RunDir, lines: str, status: int = KILL, **outcome: Any) -> FailureRecord:
    """Rank 1 has failed, while the kernel has logged these lines."""
    kernel_log.KMSG.touch()
    log = KernelLog()
    records = (f"4,{n},0,-;{line}\n" for n, line in enumerate(lines.splitlines()))
    kernel_log.KMSG.write_text(kernel_log.KMSG.read_text() + "".join(records))
    known: dict[str, Any] = {"guilty": (1, status), "here": (1, status), "kernel": log}
    used = cast(Plan, plan(gpus=GPUS))
    return failure_report.failure(Outcome(**known | outcome), run, used)


def quoted(record: FailureRecord) -> list[str]:
    return record["kernel"]["lines"]


def test_a_rank_that_the_kernel_killed_for_memory(run: RunDir) -> None:
    lines = OOM.format(pid=PIDS[1])
    record = failed(run, f"eth0: link up\n{lines}\n{OOM.format(pid=OTHER)}")
    assert verdict(record) == ("host_oom_killed", "died", 1)
    assert quoted(record) == lines.splitlines()
    assert "SIGKILL" in record["summary"] and str(PIDS[1]) in record["summary"]
    assert all(line[:60] in card.of_run(record) for line in lines.splitlines())
    assert not any("dmesg" in sentence for sentence in record["advice"])


def test_the_rank_that_was_killed_counts_not_the_one_that_lost_it(run: RunDir) -> None:
    report_error(run, 0, "RuntimeError", "Connection closed by peer [127.0.0.1]:5006")
    record = failed(run, OOM.format(pid=PIDS[1]), guilty=(0, 1), here=(0, 1))
    assert verdict(record)[0::2] == ("host_oom_killed", 1)
    assert (record["victim"], record["where"]) == (False, None)


def test_a_killed_worker_that_an_error_names(run: RunDir) -> None:
    message = "DataLoader worker (pid 4242) is killed by signal: Killed. "
    report_error(run, 1, "RuntimeError", message)
    record = failed(run, OOM.format(pid=4242), 1)
    assert verdict(record) == ("host_oom_killed", "error", 1) and record["worker"]
    record = failed(run, OOM.format(pid=4243), 1)
    assert verdict(record)[0] == "dataloader_worker_died" and quoted(record) == []
    assert "worker" not in failed(run, OOM.format(pid=PIDS[0]), 1), "rank 0 itself"


def test_a_kill_without_a_message_was_not_for_memory(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "oom_kills", lambda: 4)
    others = OOM.format(pid=OTHER)
    record = failed(run, others, oom_kills=3)
    assert verdict(record) == ("killed", "died", 1) and record["kernel"]["source"]
    assert not any("dmesg" in sentence for sentence in record["advice"])
    assert str(kernel_log.KMSG) in card.of_run(record), "that there is nothing"
    assert failed(run, "", oom_kills=3)["cause"] == "host_oom_killed", "no message at all"
    monkeypatch.setattr(kernel_log, "MOST_LINES", 1)
    record = failed(run, f"earlier\n{others}", oom_kills=3)
    assert record["cause"] == "host_oom_killed" and record["kernel"]["reason"], "not the whole log"


SPAWNED = "process 1 terminated with signal SIGKILL"
KILLED_RANK = Path(__file__).parents[1] / "fixtures/logs/killed/03.log"  # of torchrun


@pytest.mark.parametrize("status", [1, KILL, 128 + signal.SIGKILL])
def test_a_process_below_a_rank_that_was_killed_for_memory(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Of mp.spawn, of torchrun, or of a shell script: its PID may be unknown."""
    monkeypatch.setattr(cgroups, "oom_kills", lambda: 4)
    known: dict[str, Any] = {"oom_kills": 3}
    if status == KILL:  # a rank of torchrun, whose log has its status
        known |= {"guilty": (None, 1), "here": (None, 1)}
        torchrun = run.launcher_log("torchrun")
        torchrun.write_bytes(KILLED_RANK.read_bytes())
        known["log_from"] = {torchrun: 0}
    elif status == 1:
        report_error(run, 1, "ProcessExitedException", SPAWNED)
    found = failed(run, OOM.format(pid=OTHER), status, ours=False, **known)
    assert found["cause"] == "host_oom_killed" and quoted(found) == [] and found["oom_kill"]
    found = failed(run, OOM.format(pid=OTHER), status, ours=False, **known, pids={OTHER: 1})
    assert verdict(found)[::2] == ("host_oom_killed", 1)
    assert quoted(found)[:2] == OOM.format(pid=OTHER).splitlines()
    assert found["oom_kill"]


@pytest.mark.parametrize(("pid", "cause"), [(OTHER, "host_oom_killed"), (PIDS[1], "killed")])
def test_the_process_that_a_rank_names(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, pid: int, cause: str
) -> None:
    monkeypatch.setattr(cgroups, "oom_kills", lambda: 4)
    report_error(run, 1, "ProcessExitedException", SPAWNED, pid=pid)
    record = failed(run, OOM.format(pid=OTHER), 1, ours=False, oom_kills=3)
    assert record["cause"] == cause
    report_error(run, 1, "MemoryError", "")
    assert "oom_kill" not in failed(run, "", 1, oom_kills=3)


def test_a_log_that_cannot_be_read_leaves_the_command(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    record = failed(run, "", kernel=KernelLog())  # the file does not exist
    assert record["kernel"]["source"] == "" and record["kernel"]["reason"]
    assert "dmesg" in record["advice"][0]
    assert "dmesg" in failed(run, "", kernel=None)["advice"][0]


def test_pids_of_the_host_prove_nothing_in_a_container(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pids").symlink_to("pid:[4026532001]")
    monkeypatch.setattr(gpu_processes, "PIDS", tmp_path / "pids")
    record = failed(run, OOM.format(pid=PIDS[1]))
    assert verdict(record)[0] == "killed" and record["kernel"]["source"] == ""
    assert "dmesg" in record["advice"][0]
    assert failed(run, LOST.format(bus="5e"), ABORT)["cause"] == "gpu_hardware", "by its address"


@pytest.mark.parametrize("line", [SEGFAULT, TRAP])
def test_the_library_of_a_crash_is_evidence(run: RunDir, line: str) -> None:
    record = failed(run, f"{line.format(pid=OTHER)}\n{line.format(pid=PIDS[1])}", SEGV)
    assert verdict(record) == ("segfault", "died", 1)
    assert quoted(record) == [line.format(pid=PIDS[1])]
    assert ".so" in card.of_run(record)


def test_a_gpu_of_the_run_has_failed(run: RunDir) -> None:
    """Rank 0 was aborted, because it waited for rank 1."""
    line = LOST.format(bus="5e")
    record = failed(run, line, ABORT, guilty=(0, ABORT), here=(0, ABORT))
    assert verdict(record)[0::2] == ("gpu_hardware", 1)
    assert quoted(record) == [line] and "0000:5e:00" in record["summary"]
    bus = next(s for s in signatures.signatures() if s.id == "gpu.hw.bus")
    assert set(filled(bus.advice, {})) <= set(record["advice"])
    assert not any("dmesg" in sentence for sentence in record["advice"])


@pytest.mark.parametrize(
    "line",
    [
        LOST.format(bus="af"),  # a GPU of another job
        MMU.format(bus="5e", pid=OTHER),  # another program on the same GPU
        MMU.format(bus="af", pid=OTHER),
        "NVRM: Xid (PCI:0000:5e:00): 45, pid=4101, name=python, Ch 00000008",  # of the kill itself
        "NVRM: GPU at PCI:0000:5e:00: GPU-660d987e-5b28-3bf6-2a2d-1d5ecae7f6df",
        BUS_ERROR.format(bus="af", severity="Uncorrected (Fatal)"),
        BUS_ERROR.format(bus="5e", severity="Corrected"),
    ],
)
def test_messages_that_do_not_count(run: RunDir, line: str) -> None:
    record = failed(run, line, ABORT)
    assert verdict(record) == ("unknown", "died", 1) and quoted(record) == []


def test_an_error_of_a_kernel_is_the_programs(run: RunDir) -> None:
    record = failed(run, MMU.format(bus="5e", pid=PIDS[1]), ABORT)
    assert verdict(record) == ("cuda_device_assert", "died", 1)
    report_error(run, 1, "ValueError", "planted")
    record = failed(run, MMU.format(bus="5e", pid=PIDS[1]), 1)
    assert verdict(record) == ("cuda_device_assert", "error", 1)
    assert "planted" in record["summary"]


def test_a_launch_failure_is_of_the_gpu_only_with_evidence(run: RunDir) -> None:
    """CUDA reports a bad pointer of a kernel by the same number."""
    report_error(run, 1, "AcceleratorError", "CUDA error: unspecified launch failure")
    record = failed(run, MMU.format(bus="5e", pid=PIDS[1]), 1)
    assert verdict(record) == ("cuda_device_assert", "error", 1) and record["suspect_gpu"]
    record = failed(run, LOST.format(bus="5e"), 1)
    assert verdict(record) == ("gpu_hardware", "error", 1) and "suspect_gpu" not in record


def test_further_messages_about_a_gpu_are_shown(run: RunDir) -> None:
    lines = [
        BUS_ERROR.format(bus="5E", severity="Uncorrected (Fatal)"),
        "nvidia-nvswitch3: SXid (PCI:0000:c3:00.0): 20034, Fatal, Link 54 LTSSM Fault Up",
        "NVRM: Xid (PCI:0000:5e:00): 999, pid=4101, name=python, unheard of",
    ]
    record = failed(run, "\n".join(lines), ABORT)
    assert verdict(record) == ("unknown", "died", 1) and quoted(record) == lines


def test_a_flood_of_messages_is_bounded(run: RunDir) -> None:
    lines = [f"{MMU.format(bus='5e', pid=PIDS[1])} {n}" for n in range(50)]
    found = quoted(failed(run, "\n".join([*lines, lines[0]]), ABORT))
    assert found == [*lines[:3], *lines[-3:]]


def test_a_hang_on_a_failed_gpu(run: RunDir) -> None:
    record = failed(run, LOST.format(bus="3b"), 0, finding=finding())
    assert verdict(record) == ("hang", "hang", 1) and len(quoted(record)) == 1
    bus = next(s for s in signatures.signatures() if s.id == "gpu.hw.bus")
    assert record["advice"][0] == filled(bus.advice, {})[0]


@pytest.mark.parametrize("named", [1, None])
def test_a_hang_of_the_rank_whose_gpu_has_failed(run: RunDir, named: int | None) -> None:
    """A restart would meet the same GPU."""
    record = failed(
        run, LOST.format(bus="5e"), 0, guilty=None, here=None, finding=finding(rank=named)
    )
    assert verdict(record) == ("gpu_hardware", "hang", 1) and record["exit_code"] == 5
    assert set(record["waiting"]) == {"0"} and "0000:5e:00" in record["summary"]
    failure = Failure(record["cause"], record["kind"], 1, 0, 7, 5, "", record["summary"])
    retried = cast(Plan, plan(gpus=GPUS) | {"retries": {"value": 3, "reason": ""}})
    assert isinstance(recovery_policy.remedy(failure, retried, []), GiveUp)


def test_a_hang_without_the_gpu_of_a_rank(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver lists one less, wherever the stacks show the ranks."""
    gone = "the driver no longer lists GPU 0"
    monkeypatch.setattr(failed_gpus, "lost", lambda *_: (gone, (0,)))
    record = failed(run, "", 0, guilty=None, here=None, finding=finding())
    assert verdict(record) == ("gpu_hardware", "hang", 0)
    assert record["lost_ranks"] == [0] and record["where"] is None
    assert gone in record["summary"] and record["waiting"] == {}


def test_a_clear_cause_does_not_need_the_log(run: RunDir) -> None:
    report_error(run, 1, "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB")
    record = failed(run, LOST.format(bus="5e"), 1)
    assert verdict(record)[0] == "gpu_oom" and "kernel" not in record


def test_secrets_and_control_characters_do_not_reach_the_record(run: RunDir) -> None:
    line = SEGFAULT.format(pid=PIDS[1]) + " token=abcdef0123456789\\x1b[31m"
    (shown,) = quoted(failed(run, line, SEGV))
    assert "abcdef" not in shown and "\x1b" not in shown
