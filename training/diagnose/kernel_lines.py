"""Messages of the kernel about the processes and GPUs of a run. A name proves nothing: another job
runs python too, and an Xid may be of a GPU that is not the run's."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from training.core import cause_ids
from training.diagnose import scan, signatures
from training.diagnose.signatures import Signature
from training.host.gpus import PCI_DEVICES

if TYPE_CHECKING:
    from training.core.contracts.plan import GpuRecord
    from training.host.xid_events import XidEvent

NAME = r".{1,15}"  # of a thread, at most
KILLED = re.compile(r"\bKilled process (?P<pid>\d+) \(")
# Each names a thread: the process itself is its first one.
OF_PROCESS = (
    KILLED,
    re.compile(rf"oom-kill:.*,task={NAME},pid=(?P<pid>\d+)"),
    re.compile(
        rf"(?:^|traps: ){NAME}\[(?P<pid>\d+)\]:? (?:segfault at|general protection|trap "
        r"|unhandled |stack segment|bad frame)"
    ),
    re.compile(
        rf"(?:Killing|Sending SIGBUS to) {NAME}:(?P<pid>\d+) (?:early )?due to hardware memory"
    ),
    re.compile(rf"\btask {NAME}:(?P<pid>\d+) blocked for more than"),
    re.compile(rf"soft lockup - CPU#\d+ stuck for \d+s! \[{NAME}:(?P<pid>\d+)\]"),
)
XID = re.compile(r"NVRM: Xid \([^)]*\): \d+(?:, pid='?(?P<pid>\d+))?")
NVRM = "NVRM: "
# NVML and some messages have eight digits for the domain, others no function.
ADDRESS = re.compile(
    r"\b(?:0{4})?([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2})(\.[0-7])?(?![0-9a-f])", re.I
)
ON_PCI = re.compile(
    r"(?:PCIe Bus Error: severity=|AER: (?:Multiple )?)(?:Uncorrected|Uncorrectable)\b"
    r"|DPC: containment event|Slot\([^)]*\): (?:Link Down|Card not present)"
)
# The switches connect all GPUs of the machine.
SWITCH = re.compile(r"nvidia-nvswitch\d*: SXid \([^)]*\): \d+, Fatal")
# Where a rank ends within a collective by NVLS, the other GPUs report an access to its memory, and
# then a contained error of their own, which is intact.
PEER_ACCESS, CONTAINED = "137", "94"
MEMORY = ("gpu.hw.ecc", "gpu.hw.ecc_recorded")
LINK = "gpu.hw.nvlink"


@dataclass(frozen=True)
class KernelLine:
    """`place`: of the GPU in the plan; without `rank` and `place`: of all GPUs; `named`: by the PID
    of the rank's process, not only by its GPU."""

    text: str
    rank: int | None = None
    place: int | None = None
    named: bool = False
    signature: Signature | None = None
    groups: dict[str, str] = field(default_factory=dict)

    @property
    def xid(self) -> str:
        return self.groups.get("xid", "")

    @property
    def of_memory(self) -> bool:
        """Does it record a defect of memory, beside the error of a program?"""
        return self.signature is not None and self.signature.id in MEMORY

    def shows(self, cause: str, role: str) -> bool:
        known = self.signature
        return known is not None and (known.cause, known.role) == (cause, role)


def about(
    texts: Iterable[str], ranks: Mapping[int, int] | None, gpus: Sequence[GpuRecord]
) -> list[KernelLine]:
    """The messages about a run, each once. `ranks`: PID → rank, None where the kernel has other
    PIDs; `gpus`: those of the run on this machine, in the order of its ranks."""
    places, bridges = _addresses(gpus)
    found = list[KernelLine]()
    for text in dict.fromkeys(texts):
        line = _of_process(text, ranks) or _of_gpu(text, ranks, places, bridges)
        if line is None and len(gpus) > 1 and SWITCH.search(text):
            line = KernelLine(text)
        if line:
            found.append(line)
    return found


def of_events(events: Iterable[XidEvent], gpus: Sequence[GpuRecord]) -> list[KernelLine]:
    """The same of errors that the driver has reported by NVML, which has no PIDs."""
    found = list[KernelLine]()
    places = {gpu["uuid"]: place for place, gpu in enumerate(gpus)}
    for event in events:
        place = places.get(event.uuid)
        if place is None:
            continue
        address = gpus[place].get("pci") or "-"
        line = _known(KernelLine(f"NVRM: Xid (PCI:{address}): {event.number},", place=place))
        if not line.shows(cause_ids.PEER_DIED, signatures.CASCADE):
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
            text = f"{at} Xid {event.number}: GPU {gpus[place]['index']} ({address})"
            found.append(replace(line, text=text))
    return found


def is_of_link(line: KernelLine) -> bool:
    return line.signature is not None and line.signature.id == LINK


def killed(texts: Iterable[str]) -> set[int]:
    """The processes that the kernel has killed for lack of memory."""
    return {int(one["pid"]) for text in texts if (one := KILLED.search(text))}


def _of_process(text: str, ranks: Mapping[int, int] | None) -> KernelLine | None:
    named = next((found for one in OF_PROCESS if (found := one.search(text))), None)
    rank = (ranks or {}).get(int(named["pid"])) if named else None
    return None if rank is None else _known(KernelLine(text, rank, named=True))


def _of_gpu(
    text: str,
    ranks: Mapping[int, int] | None,
    places: Mapping[str, int],
    bridges: Mapping[str, int],
) -> KernelLine | None:
    on_pci = ON_PCI.search(text)
    if not on_pci and NVRM not in text:
        return None
    addresses = [(one[1].lower(), (one[2] or ".0")) for one in ADDRESS.finditer(text)]
    place = next((places[device] for device, _ in addresses if device in places), None)
    if on_pci:
        if place is None:
            place = next((bridges[a] for a in map("".join, addresses) if a in bridges), None)
        return None if place is None else KernelLine(text, place=place)
    xid = XID.search(text)
    pid = int(xid["pid"]) if xid and xid["pid"] else None
    rank = None if pid is None or ranks is None else ranks.get(pid)
    if place is None and rank is None:
        return None  # a GPU of others, or unknown
    values = {"pci": addresses[0][0]} if addresses else {}
    line = _known(KernelLine(text, rank, place, rank is not None, groups=values))
    if xid is None:
        return line if line.shows(cause_ids.GPU_HARDWARE, signatures.ROOT) else None
    others = pid is not None and ranks is not None and rank is None
    if line.shows(cause_ids.CUDA_DEVICE_ASSERT, signatures.WEAK) and others:
        return None  # an error of another program on the same GPU
    return None if line.shows(cause_ids.PEER_DIED, signatures.CASCADE) else line


def _known(line: KernelLine) -> KernelLine:
    """With its entry in the catalogue."""
    for signature, values in scan.matched(line.text)[:1]:
        return replace(line, signature=signature, groups={**line.groups, **values})
    return line


def _addresses(gpus: Sequence[GpuRecord]) -> tuple[dict[str, int], dict[str, int]]:
    """Address → place in the plan: of the GPUs, without function, and of the bridges above them."""
    places, bridges = dict[str, int](), dict[str, int]()
    for place, gpu in enumerate(gpus):
        known = ADDRESS.fullmatch(gpu.get("pci") or "")
        if known is None:
            continue
        places.setdefault(known[1].lower(), place)
        for part in (PCI_DEVICES / known[0].lower()).resolve().parts[:-1]:
            if ADDRESS.fullmatch(part):
                bridges.setdefault(part.lower(), place)
    return places, bridges
