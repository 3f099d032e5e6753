"""Resource limits of this process: control groups (containers, systemd, SLURM) and open files."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from training.core.messages import msg

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
MACHINE, MEMORY = Path("/proc/vmstat"), Path("/proc/meminfo")
UNLIMITED = 1 << 60  # cgroup v1 stores a huge number for 'no limit'


@dataclass(frozen=True)
class CgroupMemory:
    """A control group or the machine, in bytes: its limit, and its use without reclaimable file
    cache."""

    limit: int
    used: int

    @property
    def room(self) -> int:
        return max(0, self.limit - self.used)


def cpu_quota() -> float | None:
    """The CPU quota in cores; None: no limit."""
    found = []
    for folder in _groups("cpu"):
        both = _words(folder / "cpu.max") or [
            *_words(folder / "cpu.cfs_quota_us"),
            *_words(folder / "cpu.cfs_period_us"),
        ]
        if (
            len(both) == 2
            and all(_is_number(w) for w in both)
            and int(both[0]) > 0
            and int(both[1]) > 0
        ):
            found.append(int(both[0]) / int(both[1]))
    return min(found, default=None)


def cpuset() -> str:
    """The cores of this process's control group, such as 0-3,8; '' if unknown."""
    files = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
    found = (_words(folder / name) for folder in _groups("cpuset") for name in files)
    return next((words[0] for words in found if words), "")


def memory() -> CgroupMemory | None:
    """The control group with the least room; None: no limit."""
    found = []
    for folder in _groups("memory"):
        limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is None or used is None or limit >= UNLIMITED:
            continue
        found.append(CgroupMemory(limit, max(0, used - _cache(folder / "memory.stat"))))
    return min(found, key=lambda one: one.room, default=None)


def oom_kills() -> int | None:
    """Number of processes killed by the kernel for lack of memory, in the control groups of this
    process, else on this machine. None: not counted by the kernel."""
    files = [
        file
        for folder in _groups("memory")
        for file in (folder / "memory.events", folder / "memory.oom_control")
    ]
    counts = [
        facts["oom_kill"] for file in (*files, MACHINE) if "oom_kill" in (facts := _facts(file))
    ]
    return int(counts[0]) if counts else None


def available_memory() -> int:
    """Bytes available to this process, by the machine and by its control group."""
    return tightest_memory().room


def tightest_memory() -> CgroupMemory:
    """The machine, or a control group of this process with less room."""
    total, free, group = _of_machine("MemTotal"), machine_memory(), memory()
    return group if group and group.room < free else CgroupMemory(total, total - free)


def machine_memory() -> int:
    """Available bytes of the whole machine."""
    return _of_machine("MemAvailable")


def _of_machine(name: str) -> int:
    words = re.search(rf"^{name}: *(\d+) kB", MEMORY.read_text(), re.MULTILINE)
    return int(words[1]) << 10 if words else 0


def says_who() -> str:
    """Suffix of a message about memory: the limit of the control group if that is tighter than the
    machine, else ''."""
    group = memory()
    if group is None or group.room >= machine_memory():
        return ""
    return msg("host.memory.cgroup_limit", limit=group.limit / (1 << 30))


def open_files() -> tuple[int, int]:
    """(soft limit, hard limit) of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (UNLIMITED if soft == resource.RLIM_INFINITY else soft), (
        UNLIMITED if hard == resource.RLIM_INFINITY else hard
    )


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of its ancestors, whose limits apply too."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        base = ROOT / controller if names else ROOT
        # In a container the path may be that of the host and not exist: its group is then at the
        # root.
        folder = base if ".." in path else base / path.lstrip("/")
        yield folder
        yield from (parent for parent in folder.parents if parent.is_relative_to(base))


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _facts(file: Path) -> dict[str, str]:
    words = _words(file)
    return dict(zip(words[::2], words[1::2], strict=False))


def _is_number(word: str) -> bool:
    return word.lstrip("-").isdecimal()


def _number(*files: Path) -> int | None:
    words = next((found for file in files if (found := _words(file))), [])
    return int(words[0]) if words and _is_number(words[0]) else None


def _cache(file: Path) -> int:
    """Bytes of file cache: counted as used, but reclaimable, also where it is in active use.
    Version 1 has the sums with child groups under names of their own."""
    facts = _facts(file)
    total = "total_" if "total_inactive_file" in facts else ""
    texts = (facts.get(f"{total}{name}", "") for name in ("inactive_file", "active_file"))
    return sum(int(text) for text in texts if text.isdecimal())
