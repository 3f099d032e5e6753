"""Limits, sizes, stages and files shared by the launcher and the ranks of the communication test.
No torch."""

from __future__ import annotations

from pathlib import Path

from training.core import json_text, rundir
from training.core.jsonl import Record
from training.core.messages import msg

LIMIT_S = 20.0  # of one attempt, from when the last rank can communicate to the exit of the last
# A driver that is not kept loaded takes seconds for each GPU of the machine.
GPU_S = 120.0
# At a start, where caches are cold: a rank that has been in one stage of the communication for
# STILL_S hangs; others get up to PATIENCE_S more.
STILL_S, PATIENCE_S = 15.0, 100.0
SMALL_BYTES = 1 << 10
LARGE_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}
# A rank is in one of these; two sizes of each collective are between the warm-up and the
# measurement.
START, IMPORT, RENDEZVOUS, WARM_UP = "start of Python", "import of torch", "rendezvous", "warm-up"
GPU = "start of the GPU"
STARTING = (START, IMPORT, GPU, "")  # "": before its first stage
MEASUREMENT, END, EXIT = "measurement", "end of the test", "exit"


def size(count: int) -> str:
    """'1 KiB', '8 MiB'"""
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def collective(name: str, count: int) -> str:
    """The stage of a collective."""
    return f"{name} of {size(count)}"


def title(stage: str) -> str:
    """A stage, for the user."""
    titles = {
        START: msg("launcher.communication.stage.start"),
        IMPORT: msg("launcher.communication.stage.import"),
        GPU: msg("launcher.communication.stage.gpu"),
        RENDEZVOUS: msg("launcher.communication.stage.rendezvous"),
        WARM_UP: msg("launcher.communication.stage.warm_up"),
        MEASUREMENT: msg("launcher.communication.stage.measurement"),
        END: msg("launcher.communication.stage.end"),
        EXIT: msg("launcher.communication.stage.exit"),
    }
    name, of, data = stage.rpartition(" of ")
    return titles.get(stage) or (
        msg("launcher.communication.stage.collective", name=name, size=data) if of else stage
    )


def stages_for(device: str) -> list[str]:
    """All stages, in order."""
    sizes = (SMALL_BYTES, LARGE_BYTES[device])
    checked = [collective(name, count) for count in sizes for name in ("all_reduce", "broadcast")]
    gpu = [GPU] if device == "cuda" else []
    return [START, IMPORT, *gpu, RENDEZVOUS, WARM_UP, *checked, MEASUREMENT, END, EXIT]


def is_communication(stage: str) -> bool:
    """From the rendezvous on, ranks depend on each other and on their connection."""
    return stage not in (START, IMPORT, GPU)


class Files:
    """Files of each rank in the launcher's folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def heartbeat(self, rank: int) -> Path:
        """Its stage (training.core.heartbeat)."""
        return self.folder / f"rank{rank}.bin"

    def record(self, rank: int) -> Path:
        """Its result or its error."""
        return self.folder / f"rank{rank}.json"

    def read_record(self, rank: int) -> Record:
        """Empty if there is none. A wrong element may be NaN."""
        found: Record = json_text.as_given(rundir.read_json(self.record(rank)) or {})
        return found

    def log(self, rank: int) -> Path:
        """Its output."""
        return self.folder / f"rank{rank}.log"

    def stack(self, rank: int) -> Path:
        """Stack of its main thread, written on SIGUSR2."""
        return self.folder / f"rank{rank}.stack"
