"""Limits of control groups, version 1 and 2, nested and absent; open files."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from training.host import cgroups, env_vars
from training.monitor import host_stats

GIB = 1 << 30
Groups = Callable[..., None]


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    """groups('0::/a/b', {'a/cpu.max': 'max 100000'}): the group of this process, and the files of
    all groups."""

    def make(own: str, files: dict[str, str]) -> None:
        for name, text in files.items():
            file = tmp_path / "cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        (tmp_path / "own").write_text(own + "\n")
        monkeypatch.setattr(cgroups, "ROOT", tmp_path / "cgroup")
        monkeypatch.setattr(cgroups, "OWN", tmp_path / "own")

    return make


def test_no_limit_anywhere(groups: Groups) -> None:
    groups(
        "0::/user.slice",
        {
            "user.slice/cpu.max": "max 100000",
            "user.slice/memory.max": "max",
            "user.slice/memory.current": "5",
        },
    )
    assert (cgroups.cpu_quota(), cgroups.memory()) == (None, None)
    groups(
        "4:memory:/\n1:cpu,cpuacct:/",
        {
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/memory.usage_in_bytes": "7",
        },
    )
    assert (cgroups.cpu_quota(), cgroups.memory()) == (None, None)


def test_without_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "not there")
    assert (cgroups.cpu_quota(), cgroups.memory()) == (None, None)
    assert cgroups.cpuset() == ""


def test_version_2_uses_the_tightest_ancestor(groups: Groups) -> None:
    groups(
        "0::/machine/job/step",
        {
            "machine/cpu.max": "150000 100000",
            "machine/job/cpu.max": "400000 100000",
            "machine/job/cpuset.cpus.effective": "0-3,8",
            "machine/job/step/cpu.max": "max 100000",
            "machine/memory.max": str(64 * GIB),
            "machine/memory.current": str(10 * GIB),
            "machine/job/memory.max": str(16 * GIB),
            "machine/job/memory.current": str(6 * GIB),
            "machine/job/memory.stat": f"anon 1\ninactive_file {2 * GIB}\nactive_file {GIB}",
        },
    )
    assert (cgroups.cpu_quota(), cgroups.cpuset()) == (1.5, "0-3,8")
    # The kernel counts file cache as used, but reclaims it.
    assert cgroups.memory() == cgroups.CgroupMemory(16 * GIB, 3 * GIB)


def test_version_1(groups: Groups) -> None:
    groups(
        "9:name=systemd:/\n4:memory:/box\n1:cpu,cpuacct:/box\n0::/",
        {
            "cpu/box/cpu.cfs_quota_us": "50000",
            "cpu/box/cpu.cfs_period_us": "100000",
            "cpu/cpu.cfs_quota_us": "-1",
            "cpu/cpu.cfs_period_us": "100000",
            "memory/box/memory.limit_in_bytes": str(2 * GIB),
            "memory/box/memory.usage_in_bytes": str(GIB),
            "memory/box/memory.stat": "inactive_file 77\nactive_file 77\n"
            f"total_inactive_file 0\ntotal_active_file {GIB // 4}",
        },
    )
    used = GIB - GIB // 4
    assert (cgroups.cpu_quota(), cgroups.memory()) == (0.5, cgroups.CgroupMemory(2 * GIB, used))


@pytest.mark.parametrize("path", ["/docker/4711", "/../.."])
def test_a_container_that_sees_the_path_of_its_host(path: str, groups: Groups) -> None:
    groups(
        f"0::{path}", {"cpu.max": "200000 100000", "memory.max": str(GIB), "memory.current": "0"}
    )
    assert (cgroups.cpu_quota(), cgroups.memory()) == (2.0, cgroups.CgroupMemory(GIB, 0))


def test_use_above_the_limit_leaves_no_room(groups: Groups) -> None:
    groups("0::/", {"memory.max": "100", "memory.current": "150"})
    found = cgroups.memory()
    assert found is not None
    assert found.room == 0


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("50000 100000", 1), ("150000 100000", 2), ("6400000 100000", 8), ("max 100000", 8)],
)
def test_cores_are_limited_by_the_cpu_quota(
    quota: str, cores: int, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups("0::/", {"cpu.max": quota})
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert env_vars.cpu_count() == cores


def test_the_lower_limit_counts_and_is_named(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "machine_memory", lambda: 8 * GIB)
    groups("0::/", {"memory.max": str(4 * GIB), "memory.current": str(GIB)})
    assert cgroups.available_memory() == 3 * GIB
    system = host_stats.Host().look(Path("/"))
    assert (system["ram_used_bytes"], system["ram_total_bytes"]) == (GIB, 4 * GIB)
    assert cgroups.says_who() == " (the control group of this shell or container allows 4.0 GiB)"
    groups("0::/", {"memory.max": str(64 * GIB), "memory.current": str(GIB)})
    assert (cgroups.available_memory(), cgroups.says_who()) == (8 * GIB, "")


def test_memory_of_the_machine(groups: Groups) -> None:
    groups("0::/", {})
    machine = psutil.virtual_memory()
    assert abs(cgroups.machine_memory() - machine.available) < GIB
    assert host_stats.Host().look(Path("/"))["ram_total_bytes"] == machine.total


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cgroups.open_files()[0] >= 1
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, resource.RLIM_INFINITY))
    assert cgroups.open_files() == (1024, cgroups.UNLIMITED)


def test_the_oom_kill_count_of_the_kernel(
    groups: Groups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = tmp_path / "vmstat"
    machine.write_text("pgfault 5\noom_kill 7\n")
    monkeypatch.setattr(cgroups, "MACHINE", machine)
    groups("0::/job", {"job/memory.events": "low 0\noom 3\noom_kill 2\noom_group_kill 0"})
    assert cgroups.oom_kills() == 2
    groups(
        "4:memory:/old",
        {"memory/old/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4"},
    )
    assert cgroups.oom_kills() == 4
    groups("0::/nothing", {})
    assert cgroups.oom_kills() == 7
    machine.unlink()
    assert cgroups.oom_kills() is None
