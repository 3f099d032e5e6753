"""Cache of communication test results per set of GPUs, in the user's cache folder.

A verdict is valid for the same GPUs, driver and torch (which includes NCCL). It only prevents a
known hang, so a missing, damaged or unwritable file is not an error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypedDict

from training.core import rundir
from training.core.messages import msg
from training.host.env_vars import HERE, Variable

WITHOUT_P2P = {"NCCL_P2P_DISABLE": "1"}
FOUND = msg("host.p2p.found")


class P2PVerdict(TypedDict):
    gpus: list[str]  # uuids
    driver: str | None
    torch: str | None  # version
    nccl: str  # version
    variables: dict[str, str]
    found: str  # text
    time: float  # unix s


def path(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The cache file; None for a user without a home folder."""
    cache = Path(environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # to be ignored by the XDG specification
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:
            return None
    return cache / "duet/communication.json"


def remembered(
    gpu_uuids: Iterable[str], driver: str | None, torch_version: str | None
) -> dict[str, str]:
    """Environment variables needed by a run on these GPUs: name → value."""
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
    """The same as variables of a plan, without those that the user has set."""
    why = msg("host.p2p.why", FOUND=FOUND, path=path())
    found = remembered(gpu_uuids, driver, torch_version)
    return [
        Variable(name, value, why, HERE) for name, value in found.items() if not environ.get(name)
    ]


def remember(
    gpu_uuids: Iterable[str], driver: str | None, torch_version: str | None, nccl_version: str
) -> str:
    """Cache WITHOUT_P2P for these GPUs. The result as text; never raises."""
    key, file = _Key(gpu_uuids, driver, torch_version), path()
    if not key.complete or file is None:
        return msg(
            "host.p2p.not_cached", why=msg("host.p2p.no_uuids") if file else msg("host.p2p.no_home")
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
    return problem or msg("host.p2p.cached", file=file)


def forget(gpu_uuids: Iterable[str], driver: str | None, torch_version: str | None) -> str:
    """Remove the verdict on these GPUs, since they work with peer-to-peer copies. The result as
    text; '' without a verdict."""
    key, file, known = _Key(gpu_uuids, driver, torch_version), path(), _read()
    left = [v for v in known if not key.met_by(v)]
    if file is None or len(left) == len(known):
        return ""
    return _write(file, left) or msg("host.p2p.removed", file=file)


class _Key:
    def __init__(
        self, gpu_uuids: Iterable[str], driver: str | None, torch_version: str | None
    ) -> None:
        self.gpus, self.driver, self.torch = set(gpu_uuids), driver, torch_version
        self.complete = bool(self.gpus and driver and torch_version) and not self.gpus & {"", "-"}

    def met_by(self, verdict: P2PVerdict) -> bool:
        """Whether the verdict is about these GPUs or a subset: GPUs that cannot communicate as a
        pair cannot in a larger group either."""
        same = (verdict["driver"], verdict["torch"]) == (self.driver, self.torch)
        return self.complete and same and set(verdict["gpus"]) <= self.gpus


def _read() -> list[P2PVerdict]:
    """The valid verdicts in the file."""
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
    # Only variables that Duet writes: this file determines the environment of a run.
    return bool(known) and verdict["variables"] == WITHOUT_P2P


def _write(file: Path, verdicts: list[P2PVerdict]) -> str:
    """'' or an error text."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        rundir.write_json(file, {"schema_version": 1, "verdicts": verdicts})
    except OSError as error:
        return msg("host.p2p.unwritable", file=file, strerror=error.strerror)
    return ""
