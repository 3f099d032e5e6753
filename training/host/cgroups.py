"""What this process is allowed, beside what the machine has: control groups (containers, systemd,
SLURM) and open files."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
MACHINE, MEMORY = Path("/proc/vmstat"), Path("/proc/meminfo")
UNLIMITED = 1 << 60  # version 1 writes a huge number for 'no limit'


@dataclass(frozen=True)
class CgroupMemory:
    """Bytes of the tightest control group: its limit, and what of it is taken and can not be given
    back at once."""

    limit: int
    used: int

    @property
    def room(self) -> int:
        return max(0, self.limit - self.used)


def cpu_quota() -> float | None:
    """Cores' worth of time; None: no limit."""
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


def memory() -> CgroupMemory | None:
    """None: no limit."""
    found = []
    for folder in _groups("memory"):
        limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is None or used is None or limit >= UNLIMITED:
            continue
        found.append(CgroupMemory(limit, max(0, used - _cache(folder / "memory.stat"))))
    return min(found, key=lambda one: one.room, default=None)


def oom_kills() -> int | None:
    """How many processes the kernel has ended since memory ran out: in this process's control
    groups, else on this machine. None: it does not count them."""
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
    """Bytes that may still be taken: of the machine, and of the control group."""
    free, group = machine_memory(), memory()
    return min(free, group.room) if group else free


def machine_memory() -> int:
    """Bytes that the machine as a whole could still give."""
    words = re.search(r"^MemAvailable: *(\d+) kB", MEMORY.read_text(), re.MULTILINE)
    return int(words[1]) << 10 if words else 0


def says_who() -> str:
    """For a message about memory: the control group's limit when that, and not the machine, is what
    there is too little of."""
    group = memory()
    if group is None or group.room >= machine_memory():
        return ""
    return (
        f" (the control group of this shell or container allows {group.limit / (1 << 30):.1f} GiB)"
    )


def open_files() -> tuple[int, int]:
    """(limit, how far this user may raise it)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (UNLIMITED if soft == resource.RLIM_INFINITY else soft), (
        UNLIMITED if hard == resource.RLIM_INFINITY else hard
    )


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of those above it, whose limits hold too."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        base = ROOT / controller if names else ROOT
        # A container may see the path that its host knows, which is not there: its own group is
        # then at the top.
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
    """Bytes of files that were read some time ago: counted as used, given back when they are
    needed."""
    facts = _facts(file)
    text = facts.get("total_inactive_file", facts.get("inactive_file", "0"))
    return int(text) if text.isdecimal() else 0
