"""Ranks that a program has started by torch.multiprocessing.spawn. They have no variables of a
rank, since the program sets those itself, but TCP connections with each other."""

from __future__ import annotations

from pathlib import Path

from training.watchdog.probes import procfs

_CHILD = "multiprocessing.spawn import spawn_main"
_ESTABLISHED = "01"
_TAIL = len("0100007F:1F90")  # of an address: equal for IPv4 and IPv4 in IPv6

Connection = tuple[str, str]  # own end, other end


def ranks(main: int, tree: dict[int, list[int]] | None = None) -> dict[int, int]:
    """Rank → PID of the processes that `main` has spawned, in that order; {} until all of them are
    connected with another. Data-loader workers, which are spawned too, are not."""
    children = (procfs.tree() if tree is None else tree).get(main, [])
    found = [child for child in children if _CHILD in procfs.command(child)]
    ends = {child: _connections(child) for child in found} if len(found) > 1 else {}
    for child in found:
        others = {end for other in ends if other != child for end in ends[other]}
        if not any((there, here) in others for here, there in ends.get(child, ())):
            return {}
    return dict(enumerate(sorted(found, key=lambda child: (procfs.began(child), child))))


def _connections(pid: int) -> set[Connection]:
    files, found = procfs.open_files(pid), set[Connection]()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:  # it has exited, or the kernel has no IPv6
            continue
        for fields in map(str.split, lines):
            if fields[3] == _ESTABLISHED and f"socket:[{fields[9]}]" in files:
                found.add((fields[1][-_TAIL:], fields[2][-_TAIL:]))
    return found
