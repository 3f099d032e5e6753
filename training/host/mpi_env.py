"""Ranks and nodes of an mpirun: Open MPI, MPICH, Intel MPI, MVAPICH, and PALS of HPE Cray."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.host import ports
from training.host.placement import (
    DEFAULT_PORT,
    LOOPBACK,
    NODE,
    OFF,
    RANK,
    LauncherOptions,
    Topology,
    inside,
)

SOURCE = "mpi"
# rank, number of ranks, rank on this machine, ranks on this machine. PMI_RANK alone may be of srun.
_ORDER = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_NAMES = (
    tuple(f"OMPI_COMM_WORLD_{name}" for name in _ORDER),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    tuple(f"MV2_COMM_WORLD_{name}" for name in _ORDER),
    tuple(f"PMI_{name}" for name in _ORDER),  # PALS
)
_NODES = "OMPI_MCA_orte_num_nodes"  # up to Open MPI 4
_UNBOUND = {  # by the last variable of each row
    "OMPI_COMM_WORLD_LOCAL_SIZE": ["--bind-to none"],
    "MPI_LOCALNRANKS": ["-genv I_MPI_PIN=off", "-bind-to none"],  # Intel MPI, MPICH
    "MV2_COMM_WORLD_LOCAL_SIZE": ["MV2_ENABLE_AFFINITY=0"],
    "PMI_LOCAL_SIZE": ["--cpu-bind none"],
}
_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")


@dataclass(frozen=True)
class MpiProcess:
    name: str  # of the variable with the number of processes
    rank: int
    size: int
    local_rank: int
    local_size: int
    nodes: int  # machines with processes, in old versions all allocated ones; 0: unknown

    @property
    def one_per_node(self) -> bool:
        """Whether each process is alone on its machine, as far as this one knows."""
        return self.local_size == 1 and not 0 < self.nodes < self.size


def process(environ: Mapping[str, str]) -> MpiProcess | None:
    """This process of an mpirun; None outside of one, and if it is the only one."""
    for names in _NAMES:
        words = [environ.get(name, "") for name in names]
        if all(word.isdecimal() for word in words) and int(words[1]) > 1:
            rank, size, local_rank, local_size = map(int, words)
            inside(names[0], rank, names[1], size)
            nodes = environ.get(_NODES, "")
            known = int(nodes) if nodes.isdecimal() else 0
            return MpiProcess(names[1], rank, size, local_rank, local_size, known)
    return None


def unbound(environ: Mapping[str, str]) -> list[str]:
    """The options of mpirun with which it binds no process to cores."""
    return next(options for name, options in _UNBOUND.items() if name in environ)


def one_per_machine(environ: Mapping[str, str]) -> str:
    """The options of mpirun for one process on each machine, with all its cores."""
    return f"--map-by ppr:1:node {unbound(environ)[0]}" if _NAMES[0][1] in environ else "-ppn 1"


def rank(environ: Mapping[str, str], asked: LauncherOptions, found: MpiProcess) -> Topology:
    """This process is a rank. Raises UserError without the address of rank 0."""
    here = found.local_size == found.size
    return Topology(
        RANK,
        SOURCE,
        msg("host.place.mpi_ranks", size=found.size, name=found.name),
        rank=found.rank,
        local_rank=found.local_rank,
        world_size=found.size,
        local_world_size=found.local_size,
        master_addr=LOOPBACK if here else _address(environ, asked, found),
        master_port=_port(environ, asked),
    )


def node(environ: Mapping[str, str], asked: LauncherOptions, found: MpiProcess) -> Topology:
    """This process is alone on its machine: the ranks are started here."""
    return Topology(
        NODE,
        SOURCE,
        msg("host.place.mpi_nodes", size=found.size, name=found.name),
        nnodes=found.size,
        node_rank=found.rank,
        master_addr=_address(environ, asked, found),
        master_port=_port(environ, asked),
    )


def _address(environ: Mapping[str, str], asked: LauncherOptions, found: MpiProcess) -> str:
    """mpirun does not export the machine of rank 0."""
    address = asked.master_addr or environ.get("MASTER_ADDR", "")
    if address:
        return address
    export = "-x MASTER_ADDR" if found.name.startswith("OMPI") else "-genvlist MASTER_ADDR"
    raise UserError(
        Problem(
            "environment.no_master_addr",
            msg("host.place.mpi_no_address", size=found.size, name=found.name),
            msg("host.place.address_of_node_0"),
            [
                f"MASTER_ADDR=10.0.0.1 mpirun {export} …",
                "--master_addr=10.0.0.1",
                msg("host.place.start_here", OFF=OFF),
            ],
        )
    )


def _port(environ: Mapping[str, str], asked: LauncherOptions) -> int:
    """The same on every process, and another one for each job where that has an ID."""
    given = environ.get("MASTER_PORT", "")
    if asked.master_port or (given.isdecimal() and int(given)):
        return asked.master_port or int(given)
    job = next((environ[name] for name in _JOB if environ.get(name)), "")
    return ports.QUIET[zlib.crc32(job.encode()) % len(ports.QUIET)] if job else DEFAULT_PORT
