"""What is compared: the command of each machine, and the records of the steps it makes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.elastic.network import address
from benchmarks.losses import SHAPE
from benchmarks.recovery import CONFIG, QUIET
from training.core.rundir import RunDir, read_records

STEPS, SAVE_EVERY = 160, 10
# Sequences of a step and, at most, of one pass; tokens of a sequence (all as in the script); its
# pause in seconds, so that a step takes longer with fewer ranks.
BATCH, MICRO, TOKENS, PACE_S = 12, 3, 32, 0.02
PORT, RESTARTS, RUN = 29500, 10, "run"
PACE = ROOT / "benchmarks/elastic/pace"
SCRIPT = ROOT / "benchmarks/elastic/script.py"
# `hang_timeout` is for a rank that is stuck, which no loss here is: the default, 60 s.
FLAGS = {k: v for k, v in (SHAPE | QUIET).items() if k != "hang_timeout"} | {
    "total_batch_size": BATCH * TOKENS,
    "device_batch_size": MICRO,
    "max_seq_len": TOKENS,
    "num_iterations": STEPS,
    "save_every": SAVE_EVERY,
    "rendezvous_timeout": 60,
}
VARIABLES = {
    "PACE_S": str(PACE_S),
    "PACE_TOKENS": str(TOKENS),
    # for torchrun's ranks: Duet finds the interface by itself
    "GLOO_SOCKET_IFNAME": "eth0",
    # torchrun's ranks would often get addresses of the start before (pytorch#135712)
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Start:
    """One start of the launcher of one machine."""

    folder: Path  # of the case
    machines: int
    number: int  # of this machine
    ranks: int  # on this machine

    own_disk: bool = False

    @property
    def disk(self) -> Path:
        return self.folder / (f"disk{self.number}" if self.own_disk else "disk")

    @property
    def place(self) -> dict[str, object]:
        """Duet's flags for the files of this machine."""
        logs = self.folder / f"logs{self.number}"
        return {"out_dir": self.disk, "log_dir": logs, "run_name": RUN}


@dataclass(frozen=True)
class Program:
    title: str
    command: Callable[[Start], list[str]]
    records: Callable[[Path], list[Record]]  # of all machines, in the order of time
    own_disks: bool = False
    imports: Path | None = None  # a folder of modules that each interpreter imports first


def _training(start: Start) -> list[str]:
    flags = FLAGS | start.place | {"min_ranks": 1, "retries": RESTARTS}
    each = BATCH // (start.machines * start.ranks)
    flags["device_batch_size"] = max(n for n in range(1, MICRO + 1) if each % n == 0)
    if start.machines > 1:
        flags |= {"nnodes": start.machines, "node_rank": start.number}
        flags |= {"master_addr": address(0), "master_port": PORT}
    words = [f"--{name}={value}" for name, value in flags.items()]
    return ["./launch_train.sh", str(start.ranks), CONFIG, *words]


def _training_records(folder: Path) -> list[Record]:
    """A machine that continues the run may have copied the records of another one."""
    found: dict[tuple[float, int], Record] = {}
    for disk in sorted(folder.glob("disk*")):
        for one in read_records(RunDir(disk / RUN).metrics):
            if "loss" in one:
                made = {name: one[name] for name in ("time", "step", "loss")}
                key = (one["time"], one["step"])
                found.setdefault(key, made | {"ranks": len(one["compute_ms"]), "writer": disk.name})
    return sorted(found.values(), key=lambda one: one["time"])


def _endpoint(start: Start) -> list[str]:
    """The same flags for both launchers."""
    return [
        f"--nnodes=1:{start.machines}",
        f"--nproc-per-node={start.ranks}",
        f"--max-restarts={RESTARTS}",
        f"--rdzv-endpoint={address(0)}:{PORT}",
    ]


def _script(start: Start) -> list[str]:
    return [str(SCRIPT), str(start.folder), str(STEPS), str(SAVE_EVERY)]


def _duet_script(start: Start) -> list[str]:
    flags = start.place | {"node_rank": start.number, "device": "cpu", "report": "false"}
    own = [f"--{name}={value}" for name, value in flags.items()]
    return ["./duet", "run", *_endpoint(start), *own, *_script(start)]


def _torchrun(start: Start) -> list[str]:
    # torchrun finds out by the host name which machine is the first, but all have the same.
    first = "true" if start.number == 0 else "false"
    own = ["--rdzv-backend=c10d", "--rdzv-id=run", f"--rdzv-conf=is_host={first}"]
    own += [f"--local-addr={address(start.number)}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    return [*torchrun, *_endpoint(start), *own, *_script(start)]


def _script_records(folder: Path) -> list[Record]:
    return sorted(read_records(folder / "records.jsonl"), key=lambda one: one["time"])


TRAINING, OWN, DUET, TORCHRUN = "training", "own", "duet", "torchrun"
PROGRAMS = {
    TRAINING: Program("Duet's training", _training, _training_records, imports=PACE),
    DUET: Program("a script under `duet run`", _duet_script, _script_records),
    TORCHRUN: Program("the same script under torchrun", _torchrun, _script_records),
    OWN: Program("Duet's training, no common disk", _training, _training_records, True, PACE),
}
