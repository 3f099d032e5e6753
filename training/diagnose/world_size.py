"""The number of ranks that a line of a log names."""

from __future__ import annotations

import re

WORLD = re.compile(
    r"(?:world[_ -]?size|num_processes|nproc[_-]per[_-]node|WORLD_SIZE|nranks|num_ranks|n_gpus"
    r"|with (?=\d+ processes))\W{0,4}(\d{1,5})\b",
    re.I,
)
PER_NODE = re.compile(r"nproc[_-]per[_-]node", re.I)
NODES = re.compile(r"nnodes\W{1,4}(\d{1,5})(:\d+)?", re.I)


def world_size(text: str) -> int | None:
    found = WORLD.search(text)
    if found is None:
        return None
    nodes = NODES.search(text) if PER_NODE.match(found[0]) else None
    if nodes is None:
        return int(found[1])
    return None if nodes[2] else int(found[1]) * int(nodes[1])  # a range: not known
