"""Ranks that a program has started by multiprocessing or os.fork. They have no variables of a rank,
since the program sets those itself, but TCP connections with each other."""

from __future__ import annotations

from pathlib import Path

from training.watchdog.probes import procfs

_SPAWNED = "multiprocessing.spawn import spawn_main"
_WORKER = "pt_data_worker"  # name that torch gives to data-loader workers
_GROUP = ("gloo", "nccl")  # in the names of the threads of a process group
_ESTABLISHED = "01"
_TAIL = len("0100007F:1F90")  # of an address: equal for IPv4 and IPv4 in IPv6

Connection = tuple[str, str]  # own end, other end


def ranks(
    main: int, tree: dict[int, list[int]] | None = None, settled: bool = False
) -> tuple[dict[int, int], int]:
    """Rank → PID of the processes that `main` has started, in that order, and itself where it
    trains too; and how many processes might be ranks. {} until all of those are connected with
    another; if `settled`, the unconnected ones are not ranks."""
    children = _children(main, procfs.tree() if tree is None else tree)
    if not children:
        return {}, 0
    # a forked process has the open sockets of its parent
    inherited = procfs.open_files(main)
    ends = {child: _connections(child, procfs.open_files(child) - inherited) for child in children}
    if in_group(main):
        ends[main] = _connections(main, inherited)
    connected = [
        one
        for one in ends
        if any(
            (there, here) in ends[other]
            for other in ends
            if other != one
            for here, there in ends[one]
        )
    ]
    if len(connected) < 2 or (len(connected) < len(ends) and not settled):
        return {}, len(ends)
    in_order = sorted(connected, key=lambda one: (procfs.began(one), one))
    return dict(enumerate(in_order)), len(ends)


def in_group(pid: int) -> bool:
    """Has it joined a process group?"""
    return any(part in name.lower() for name in procfs.threads(pid) for part in _GROUP)


def _children(main: int, tree: dict[int, list[int]]) -> list[int]:
    """Processes that multiprocessing has started, by any of its methods, and forked ones: these
    have the command line of their parent. Data-loader workers are left out where torch names
    them."""
    own, found = procfs.command(main), []
    for child in tree.get(main, []):
        command = procfs.command(child)
        if procfs.FORKSERVER in command:
            found += tree.get(child, [])
        elif _SPAWNED in command or (command and command == own):
            found.append(child)
    return [child for child in found if procfs.name(child) != _WORKER]


def _connections(pid: int, files: set[str]) -> set[Connection]:
    """Established TCP connections among these files of a process."""
    found = set[Connection]()
    if not any(file.startswith("socket:") for file in files):
        return found
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:  # it has exited, or the kernel has no IPv6
            continue
        for fields in map(str.split, lines):
            if fields[3] == _ESTABLISHED and f"socket:[{fields[9]}]" in files:
                found.add((fields[1][-_TAIL:], fields[2][-_TAIL:]))
    return found
