"""What the launcher and the ranks of the communication test both know: limits, sizes, stages,
files. No torch."""

from __future__ import annotations

from pathlib import Path

LIMIT_S = (
    20.0  # of one try, from the start of the ranks to the end of the last, torch's import included
)
SMALL_BYTES = 1 << 10
LARGE_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}
# A rank is in one of these; two sizes of each collective stand between the warm-up and the
# measurement.
START, IMPORT, MEETING, WARM_UP = "start of Python", "import of torch", "meeting", "warm-up"
MEASUREMENT, END, EXIT = "measurement", "end of the test", "exit"


def size(count: int) -> str:
    """'1 KiB', '8 MiB'"""
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def collective(name: str, count: int) -> str:
    """The stage of a collective."""
    return f"{name} of {size(count)}"


def stages_for(device: str) -> list[str]:
    """All stages, in the order in which every rank goes through them."""
    sizes = (SMALL_BYTES, LARGE_BYTES[device])
    checked = [collective(name, count) for count in sizes for name in ("all_reduce", "broadcast")]
    return [START, IMPORT, MEETING, WARM_UP, *checked, MEASUREMENT, END, EXIT]


class Files:
    """What each rank leaves in the launcher's folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def heartbeat(self, rank: int) -> Path:
        """Its stage (training.core.heartbeat)."""
        return self.folder / f"rank{rank}.bin"

    def record(self, rank: int) -> Path:
        """Its result, or why it failed."""
        return self.folder / f"rank{rank}.json"

    def log(self, rank: int) -> Path:
        """Its output."""
        return self.folder / f"rank{rank}.log"

    def stack(self, rank: int) -> Path:
        """Where its main thread stood when it was asked by SIGUSR2."""
        return self.folder / f"rank{rank}.stack"
