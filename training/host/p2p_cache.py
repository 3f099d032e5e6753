"""What communication tests have found out about sets of GPUs, kept for later starts in the user's
cache folder.

A verdict holds for these GPUs, this driver and this torch (which brings its NCCL). It is a hint
that saves a hang: a file that is missing, damaged or can not be written is no reason to stop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypedDict

from training.core import rundir
from training.host.env_vars import Variable

WITHOUT_P2P = {"NCCL_P2P_DISABLE": "1"}
FOUND = "the GPUs hang or get wrong data with peer-to-peer copies and work without"


class P2PVerdict(TypedDict):
    gpus: list[str]  # uuids
    driver: str | None
    torch: str | None  # version
    nccl: str  # version
    variables: dict[str, str]
    found: str  # for people
    time: float  # unix s


def path(environ: Mapping[str, str] = os.environ) -> Path | None:
    """None where a user has no folder of his own."""
    cache = Path(environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # is to be ignored then, says the XDG specification
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:
            return None
    return cache / "duet/communication.json"


def remembered(
    gpu_uuids: Iterable[str], driver: str | None, torch_version: str | None
) -> dict[str, str]:
    """Environment variables that a run on these GPUs needs, name → value."""
    key = _Key(gpu_uuids, driver, torch_version)
    found: dict[str, str] = {}
    for verdict in _read():
        if key.met_by(verdict):
            found |= verdict["variables"]
    return found


def variables(
    gpu_uuids: Iterable[str],
    driver: str | None,
    torch_version: str | None,
    environ: Mapping[str, str],
) -> list[Variable]:
    """The same as a plan has them; the user's own values stay."""
    why = (
        f"{FOUND}, says a communication test ({path()}); NCCL_P2P_DISABLE=0 with --check tries "
        f"again"
    )
    found = remembered(gpu_uuids, driver, torch_version)
    return [
        Variable(name, value, why, "set here")
        for name, value in found.items()
        if not environ.get(name)
    ]


def remember(
    gpu_uuids: Iterable[str], driver: str | None, torch_version: str | None, nccl_version: str
) -> str:
    """The variables of WITHOUT_P2P for these GPUs; what became of it, for people. Never raises."""
    key, file = _Key(gpu_uuids, driver, torch_version), path()
    if not key.complete or file is None:
        return (
            f"not remembered: "
            f"{'the driver does not name the GPUs' if file else 'there is no home folder'}"
        )
    new: P2PVerdict = {
        "gpus": sorted(key.gpus),
        "driver": driver,
        "torch": torch_version,
        "nccl": nccl_version,
        "variables": WITHOUT_P2P,
        "found": FOUND,
        "time": time.time(),
    }
    problem = _write(file, [*(v for v in _read() if not key.met_by(v)), new])
    return problem or f"remembered in {file}: later starts on these GPUs set it by themselves"


def forget(gpu_uuids: Iterable[str], driver: str | None, torch_version: str | None) -> str:
    """These GPUs have just worked with peer-to-peer copies; what became of it, empty when nothing
    was known."""
    key, file, known = _Key(gpu_uuids, driver, torch_version), path(), _read()
    left = [v for v in known if not key.met_by(v)]
    if file is None or len(left) == len(known):
        return ""
    return _write(file, left) or f"forgotten, since they work now: {FOUND} ({file})"


class _Key:
    def __init__(
        self, gpu_uuids: Iterable[str], driver: str | None, torch_version: str | None
    ) -> None:
        self.gpus, self.driver, self.torch = set(gpu_uuids), driver, torch_version
        self.complete = bool(self.gpus and driver and torch_version) and not self.gpus & {"", "-"}

    def met_by(self, verdict: P2PVerdict) -> bool:
        """Found for these GPUs or for some of them: two that can not talk can not in larger company
        either."""
        same = (verdict["driver"], verdict["torch"]) == (self.driver, self.torch)
        return self.complete and same and set(verdict["gpus"]) <= self.gpus


def _read() -> list[P2PVerdict]:
    """The verdicts that are whole."""
    file = path()
    found = (rundir.read_json(file) or {}).get("verdicts") if file else None
    return [v for v in found if _whole(v)] if isinstance(found, list) else []


def _whole(verdict: object) -> bool:
    if not isinstance(verdict, dict) or not {"gpus", "driver", "torch", "variables"} <= set(
        verdict
    ):
        return False
    gpus = verdict["gpus"]
    known = isinstance(gpus, list) and gpus and all(isinstance(g, str) for g in gpus)
    # Only what we would have written: this file decides on the environment of a run.
    return bool(known) and verdict["variables"] == WITHOUT_P2P


def _write(file: Path, verdicts: list[P2PVerdict]) -> str:
    """Empty, or what went wrong."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        rundir.write_json(file, {"schema_version": 1, "verdicts": verdicts})
    except OSError as error:
        return f"not remembered: {file} can not be written ({error.strerror})"
    return ""
