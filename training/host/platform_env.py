"""Nodes of platforms that start one process per machine: PyTorchJob and TrainJob of Kubeflow,
SkyPilot, JobSet and Indexed Jobs of Kubernetes."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.host import hosts
from training.host.placement import (
    DEFAULT_PORT,
    NODE,
    OFF,
    LauncherOptions,
    Topology,
    inside,
)

SOURCE = "platform"
RANKS = "PET_NPROC_PER_NODE"
# torchrun's --shutdown-timeout
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
INDEX = "JOB_COMPLETION_INDEX"


def torchrun_nodes(environ: Mapping[str, str], address: str = "") -> tuple[int, int] | None:
    """(node rank, nodes) from torchrun's own variables, which PyTorchJob sets too: its WORLD_SIZE
    counts ranks if the job has nprocPerNode. `address`: --master_addr. None if incomplete."""
    count = _pet_nodes(environ)
    node = environ.get("PET_NODE_RANK") or environ.get("RANK", "")
    if not (count and node.isdecimal() and (address or _pet_address(environ))):
        return None
    return int(node), count


def ranks_per_node(environ: Mapping[str, str], asked: LauncherOptions) -> str:
    """PET_NPROC_PER_NODE if torchrun's variables make this process a node of several; else ''."""
    if hosts.given(asked) or asked.launcher != "auto":
        return ""
    found = torchrun_nodes(environ, asked.master_addr)
    return environ.get(RANKS, "") if found and found[1] > 1 else ""


def fewest_nodes(environ: Mapping[str, str], asked: LauncherOptions) -> int:
    """MIN of PET_NNODES=MIN:MAX where these variables place this machine; 0 otherwise."""
    least, _, most = environ.get("PET_NNODES", "").partition(":")
    found = most and ranks_per_node({RANKS: "1", **environ}, asked)
    return int(least) if found and 0 < int(least) < int(most) else 0


def complete(environ: Mapping[str, str], asked: LauncherOptions) -> None:
    """Raises UserError if torchrun's variables ask for several machines, but lack what numbers and
    connects them: each would train alone. --nnodes overrides them."""
    count = _pet_nodes(environ)
    if count < 2 or asked.nnodes > 1:
        return
    numbered = (environ.get("PET_NODE_RANK") or environ.get("RANK", "")).isdecimal()
    endpoint = environ.get("PET_RDZV_ENDPOINT", "").rpartition(":")[0]
    address = asked.master_addr or _pet_address(environ)
    lacking = ["PET_NODE_RANK"] * (not numbered) + ["PET_MASTER_ADDR"] * (not address)
    rank = environ.get("PET_NODE_RANK") or environ.get("RANK", "") if numbered else "N"
    flags = f"--nnodes={count} --node_rank={rank} --master_addr={address or endpoint or 'ADDRESS'}"
    each = msg("host.place.pet_each", last=count - 1)
    elastic = environ.get("PET_RDZV_BACKEND", "static") != "static" and not numbered
    raise UserError(
        Problem(
            "environment.rank_missing",
            msg(
                "host.place.pet_missing",
                nodes=environ["PET_NNODES"],
                count=count,
                lacking=", ".join(lacking),
            ),
            msg("host.place.pet_needed"),
            [
                *([msg("host.place.pet_elastic")] if elastic else []),
                flags if numbered else f"{flags}   # {each}",
                msg("host.place.unset_one", name="PET_NNODES"),
                msg("host.place.start_here", OFF=OFF),
            ],
        )
    )


def torchrun_node(
    environ: Mapping[str, str], asked: LauncherOptions, found: tuple[int, int]
) -> Topology:
    node, count = found
    name = "PET_NODE_RANK" if environ.get("PET_NODE_RANK") else "RANK"
    inside(name, node, "PET_NNODES", count)
    port = environ.get("PET_MASTER_PORT") or environ.get("MASTER_PORT", "")
    return Topology(
        NODE,
        SOURCE,
        msg("host.place.pet", count=count),
        nnodes=count,
        node_rank=node,
        master_addr=asked.master_addr or _pet_address(environ),
        master_port=asked.master_port or _number(port) or DEFAULT_PORT,
    )


def node(environ: Mapping[str, str], asked: LauncherOptions) -> Topology | None:
    """The node of SkyPilot, or of an Indexed Job of Kubernetes; None for neither. Raises
    UserError."""
    return _sky(environ, asked) or _indexed(environ, asked)


def _sky(environ: Mapping[str, str], asked: LauncherOptions) -> Topology | None:
    addresses = environ.get("SKYPILOT_NODE_IPS", "").split()
    rank = environ.get("SKYPILOT_NODE_RANK", "")
    if len(addresses) < 2 or not rank.isdecimal():
        return None
    inside("SKYPILOT_NODE_RANK", int(rank), "SKYPILOT_NODE_IPS", len(addresses))
    return Topology(
        NODE,
        SOURCE,
        msg("host.place.sky", count=len(addresses)),
        nnodes=len(addresses),
        node_rank=int(rank),
        master_addr=asked.master_addr or addresses[0],
        master_port=asked.master_port or DEFAULT_PORT,
    )


def _indexed(environ: Mapping[str, str], asked: LauncherOptions) -> Topology | None:
    """Kubernetes numbers the pods, but the number of pods is in the job alone: --nnodes."""
    text = environ.get(INDEX, "")
    if not text.isdecimal() or asked.nnodes == 1 or asked.node_rank not in (0, int(text)):
        return None
    index = int(text)
    inside(INDEX, index, "--nnodes", asked.nnodes)
    address = asked.master_addr or environ.get("MASTER_ADDR") or _first_pod(environ, index)
    if not address:
        fixes = ["--master_addr=JOB-0.SERVICE", msg("host.place.subdomain")]
        text = msg("host.place.indexed_no_address", name=socket.gethostname())
        raise UserError(
            Problem("environment.no_master_addr", text, msg("host.place.address_of_node_0"), fixes)
        )
    return Topology(
        NODE,
        SOURCE,
        msg("host.place.indexed", count=asked.nnodes),
        nnodes=asked.nnodes,
        node_rank=index,
        master_addr=address,
        master_port=asked.master_port or _number(environ.get("MASTER_PORT", "")) or DEFAULT_PORT,
    )


def _first_pod(environ: Mapping[str, str], index: int) -> str:
    """The host name of pod 0: pods of an Indexed Job are NAME-INDEX.SUBDOMAIN, also those of a
    JobSet, if they have a subdomain of a headless service. '' otherwise."""
    own, full = socket.gethostname(), socket.getfqdn()
    if own.endswith(f"-{index}") and full.startswith(f"{own}."):
        return f"{own.removesuffix(str(index))}0{full.removeprefix(own)}"
    jobset, job = environ.get("JOBSET_NAME"), environ.get("REPLICATED_JOB_NAME")
    return f"{jobset}-{job}-0-0.{jobset}" if jobset and job else ""


def _pet_nodes(environ: Mapping[str, str]) -> int:
    """The machines of PET_NNODES, of MIN:MAX the most, as for --nnodes; 0 if invalid."""
    found = re.fullmatch(r"(?:\d+:)?(\d+)", environ.get("PET_NNODES", ""), re.ASCII)
    return int(found[1]) if found else 0


def _pet_address(environ: Mapping[str, str]) -> str:
    return environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR", "")


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
