"""Variables in the environment of a rank: its number, and the ranks with which it trains."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from training.watchdog.probes import procfs

# ranks with the same values train together
RENDEZVOUS = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)
LOOPBACK = ("127.0.0.1", "localhost", "::1")
Seat = tuple[str | None, ...]  # the variables that a launcher sets for one rank


def has_number(pid: int) -> bool:
    return not {"RANK", "LOCAL_RANK"}.isdisjoint(procfs.environment(pid))


def number(pid: int) -> int:
    """RANK; without it (Lightning) LOCAL_RANK."""
    variables = procfs.environment(pid)
    return _whole(variables.get("RANK", variables.get("LOCAL_RANK", "")))


def first(pid: int) -> int:
    """The number of the first rank of its machine."""
    variables = procfs.environment(pid)
    return number(pid) - _whole(variables.get("LOCAL_RANK", variables.get("RANK", "")))


def uncounted(pid: int, local: int) -> int:
    """Ranks before those of this machine that its number does not count. `local`: on each one."""
    variables = procfs.environment(pid)
    return 0 if "RANK" in variables else _whole(variables.get("NODE_RANK", "")) * local


def world(pid: int) -> int:
    """Number of ranks to look for on this machine."""
    variables = procfs.environment(pid)
    return _local(variables) or _whole(variables.get("WORLD_SIZE", "")) or 1


def sizes(pids: Collection[int]) -> tuple[int, int, int]:
    """The number of ranks of this machine and of all, of which these were found, and of those that
    may still join them here."""
    ranks = [procfs.environment(pid) for pid in pids]
    found = len(ranks)
    count = max([found, *(_whole(one.get("LOCAL_RANK", "")) + 1 for one in ranks)])
    total = max([count, *(_whole(one.get("WORLD_SIZE", "")) for one in ranks)])
    if known := max(map(_local, ranks), default=0):
        local = max(known, found)
        return local, max(total, local), 0
    # As many on each machine, where some have ended. All of them only if all were found: the
    # machines may differ.
    even = (size for size in range(max(count, 1), total) if total % size == 0)
    return next(even, count), total, total - found


def _local(variables: Mapping[str, str]) -> int:
    """Number of ranks of this machine; 0 where the launcher does not set it (Lightning, shell
    scripts)."""
    size = variables.get("LOCAL_WORLD_SIZE", variables.get("LOCAL_SIZE", ""))  # DeepSpeed: the 2nd
    if not size and variables.get("MASTER_ADDR") in LOOPBACK:
        size = variables.get("WORLD_SIZE", "")
    return _whole(size)


def rendezvous(pid: int) -> tuple[str | None, ...]:
    variables = procfs.environment(pid)
    return tuple(variables.get(name) for name in RENDEZVOUS)


def seat(pid: int) -> Seat:
    variables = procfs.environment(pid)
    return tuple(variables.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", *RENDEZVOUS))


def _whole(text: str) -> int:
    return int(text) if text.isdecimal() else 0
