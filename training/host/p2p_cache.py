"""Cache of communication test results per set of GPUs, in the user's cache folder.

A result is valid for the same GPUs in the same slots with the same NVLinks, direct copies, PCIe
lanes, driver, torch, NCCL, kernel, IOMMU and settings of NCCL by the user. It saves a test and
prevents a known hang, so a missing, damaged or unwritable file is not an error.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from training.core import file_lock, rundir
from training.core.messages import msg
from training.host import nccl_settings, torch_build
from training.host.env_vars import HERE, Variable
from training.host.utilization import BUSY_PERCENT

if TYPE_CHECKING:
    from training.core.contracts.plan import GpuRecord

P2P = "NCCL_P2P_DISABLE"
WITHOUT_P2P = {P2P: "1"}
FOUND = msg("host.p2p.found")
SCHEMA_VERSION = 2
LATEST_S = 1e11  # unix s, in the year 5138: a later time is damage and may have no date
# NCCL's variables without an influence on how it communicates.
_SILENT = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_SET_THREAD_NAME")


class _Measured(TypedDict):
    gpus: list[str]  # by identity()
    driver: str | None
    torch: str | None  # version
    nccl: str | None  # version
    machine: str  # kernel and IOMMU
    settings: dict[str, str]  # NCCL variables of the user, also in NCCL's files
    variables: dict[str, str]  # {} or WITHOUT_P2P
    gb_per_s: float  # size / time of a large all_reduce
    small_ms: float  # of an all_reduce of 1 KiB
    time: float  # unix s


class P2PVerdict(_Measured, total=False):
    """`busy`: other processes used the GPUs, so the times are not those of idle ones."""

    busy: bool


@dataclass(frozen=True)
class Key:
    """What a result depends on. `gpus`: by identity(); `forced`: the user has demanded
    peer-to-peer copies."""

    gpus: frozenset[str]
    driver: str | None
    torch: str | None
    nccl: str | None
    machine: str
    settings: tuple[tuple[str, str], ...]
    forced: bool = False

    @property
    def complete(self) -> bool:
        return bool(self.gpus and self.driver and self.torch) and "" not in self.gpus

    def _alike(self, verdict: P2PVerdict) -> bool:
        own = (self.driver, self.torch, self.nccl, self.machine, dict(self.settings))
        return self.complete and own == (
            *(verdict["driver"], verdict["torch"], verdict["nccl"]),
            *(verdict["machine"], verdict["settings"]),
        )

    def same(self, verdict: P2PVerdict) -> bool:
        return self._alike(verdict) and set(verdict["gpus"]) == self.gpus

    def met_by(self, verdict: P2PVerdict) -> bool:
        """Whether the verdict is about these GPUs or a subset: GPUs that cannot communicate as a
        pair cannot in a larger group either."""
        return self._alike(verdict) and set(verdict["gpus"]) <= self.gpus


def identity(gpu: GpuRecord) -> str:
    """A GPU and how it is attached; '' if the driver does not report it. Direct copies and lanes
    may change alone: by the BIOS, an option of the driver, or a card next to it."""
    if gpu["uuid"] in ("", "-"):
        return ""
    facts = (gpu.get("pci"), gpu.get("nvlinks"), gpu.get("peers"), gpu.get("lanes"))
    return " ".join([gpu["uuid"], *("-" if one is None else str(one) for one in facts)])


def key(
    gpus: Iterable[str],
    driver: str | None,
    torch_version: str | None,
    environ: Mapping[str, str] = os.environ,
) -> Key:
    settings = {
        name: value
        for name, value in nccl_settings.effective(environ).items()
        if value and name not in _SILENT
    }
    forced = settings.get(P2P) == "0"
    if forced:  # as without the variable
        del settings[P2P]
    return Key(
        *(frozenset(gpus), driver, torch_version, torch_build.nccl(), machine()),
        *(tuple(sorted(settings.items())), forced),
    )


def machine(system: Path = Path("/sys")) -> str:
    """What decides about copies between PCIe devices besides the driver: the kernel, and whether
    and how an IOMMU translates their addresses. Changing either takes a reboot."""
    kinds = set()
    try:
        units = os.listdir(system / "class/iommu")
    except OSError:  # no such folder: a container, or a kernel without IOMMU
        units = []
    for kind in (system / "kernel/iommu_groups").glob("*/type") if units else ():
        with contextlib.suppress(OSError):  # unreadable, or its last device was removed
            kinds.add(kind.read_text().strip())
    iommu = ", ".join(sorted(kinds)) or "on" if units else "off"
    return f"Linux {os.uname().release}, IOMMU {iommu}"


def path(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The cache file; None for a user without a home folder."""
    cache = Path(environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # to be ignored by the XDG specification
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:
            return None
    return cache / "duet/communication.json"


def known(of: Key) -> P2PVerdict | None:
    """The result for exactly these GPUs; None for one that the user's variables overrule."""
    found = next((v for v in _read() if of.same(v)), None)
    return None if found and of.forced and found["variables"] else found


def remembered(of: Key) -> dict[str, str]:
    """Environment variables needed by a run on these GPUs: name → value."""
    found: dict[str, str] = {}
    for verdict in _read():
        if of.met_by(verdict):
            found |= verdict["variables"]
    return found


def variables(values: Mapping[str, str], environ: Mapping[str, str]) -> list[Variable]:
    """`values` as variables of a plan, without those that the user has set."""
    why, own = msg("host.p2p.why", FOUND=FOUND, path=path()), nccl_settings.effective(environ)
    return [Variable(name, value, why, HERE) for name, value in values.items() if not own.get(name)]


def busy_gpu(gpus: Iterable[GpuRecord]) -> GpuRecord | None:
    """One that other processes use, so that times measured now are too long."""
    return next((gpu for gpu in gpus if (gpu["use_percent"] or 0) >= BUSY_PERCENT), None)


def verdict(of: Key, values: Mapping[str, str], *, gb_per_s: float, small_ms: float) -> P2PVerdict:
    """The result of a test that has just ended well with these variables."""
    return {
        "gpus": sorted(of.gpus),
        "driver": of.driver,
        "torch": of.torch,
        "nccl": of.nccl,
        "machine": of.machine,
        "settings": dict(of.settings),
        "variables": dict(values),
        "gb_per_s": gb_per_s,
        "small_ms": small_ms,
        "time": time.time(),
    }


def remember(of: Key, new: P2PVerdict, *, busy: str = "") -> str:
    """Cache a result in place of the earlier one for these GPUs, and of verdicts against
    peer-to-peer copies that it refutes. `busy`: why its times are not those of idle GPUs; they do
    not replace earlier ones. What the user should know of it, or ''; never raises."""
    file = path()
    if not of.complete or file is None:
        return msg(
            "host.p2p.not_cached", why=msg("host.p2p.no_uuids") if file else msg("host.p2p.no_home")
        )
    works = not new["variables"] and P2P not in new["settings"]
    if busy:
        new = {**new, "busy": True}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file_lock.alone(_lock(file)):
            everything = _read()
            refuted = [v for v in everything if works and of.met_by(v) and v["variables"]]
            left = [v for v in everything if v not in refuted]
            before = next((v for v in left if of.same(v) and not v.get("busy")), None)
            if busy and before and before["variables"] == new["variables"]:
                new = before  # with the times of idle GPUs
            _write(file, [*(v for v in left if not of.same(v)), new])
    except OSError as error:
        return msg("host.p2p.unwritable", file=file, strerror=error.strerror)
    if new["variables"]:
        return msg("host.p2p.cached", file=file)
    if refuted:
        return msg("host.p2p.removed", file=file)
    return msg("host.p2p.without_times", why=busy) if busy else ""


def forget(of: Key) -> None:
    """Drop the result for exactly these GPUs, which a test that has just failed refutes. A failure
    with the copies that the user demands confirms a verdict against them. Never raises."""
    file = path()
    if file is None or not any(of.same(v) for v in _read()):
        return
    # An unwritable cache is not an error; the user has set its permissions.
    with contextlib.suppress(OSError), file_lock.alone(_lock(file)):
        _write(file, [v for v in _read() if not of.same(v) or (of.forced and v["variables"])])


def _read() -> list[P2PVerdict]:
    """The valid results in the file."""
    file = path()
    found = (rundir.read_json(file) or {}).get("verdicts") if file else None
    return [cast("P2PVerdict", v) for v in found if _whole(v)] if isinstance(found, list) else []


def _whole(one: object) -> bool:
    if not isinstance(one, dict) or not _Measured.__annotations__.keys() <= one.keys():
        return False
    gpus = one["gpus"]
    named = isinstance(gpus, list) and gpus and all(isinstance(g, str) for g in gpus)
    limits = {"gb_per_s": math.inf, "small_ms": math.inf, "time": LATEST_S}
    measured = all(
        isinstance(one[name], (int, float)) and 0 < one[name] < limit
        for name, limit in limits.items()
    )
    # Only variables that Duet writes: this file determines the environment of a run.
    return bool(named) and measured and one["variables"] in ({}, WITHOUT_P2P)


def _write(file: Path, verdicts: list[P2PVerdict]) -> None:
    rundir.write_json(file, {"schema_version": SCHEMA_VERSION, "verdicts": verdicts})


def _lock(file: Path) -> Path:
    return file.with_name(f".{file.name}.lock")
