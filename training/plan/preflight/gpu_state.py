"""Hardware state of GPUs: memory errors, throttling, links. Read by `--check` only, since some
drivers take milliseconds per query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from training.core.messages import msg
from training.host.gpus import Gpu, ask

WHERE = {
    0: msg("plan.link.board"),
    10: msg("plan.link.switch"),
    20: msg("plan.link.switches"),
    30: msg("plan.link.root"),
    40: msg("plan.link.numa"),
    50: msg("plan.link.sockets"),
}


@dataclass(frozen=True)
class State:
    """State of one GPU; None: not reported by the driver."""

    index: int
    slowdowns: tuple[str, ...] | None
    uncorrected_errors: int | None  # of the memory, since the driver was loaded
    remap_pending: bool | None  # damaged memory is remapped at the next reset
    remap_failed: bool | None
    link_width: int | None
    link_width_most: int | None  # maximum of card and slot
    link_generation: int | None
    link_generation_most: int | None
    persistent: bool | None  # the driver stays loaded between programs
    nvlinks: int | None  # number of active links


@dataclass(frozen=True)
class Pair:
    """The connection of two GPUs."""

    first: int
    second: int
    where: str | None
    nvlink: bool | None
    direct: bool | None  # peer-to-peer copies

    @property
    def way(self) -> str:
        if self.nvlink:
            return "NVLink"
        copies = {True: msg("plan.link.direct"), False: msg("plan.link.through_host"), None: ""}[
            self.direct
        ]
        return msg("plan.word.comma").join(filter(None, (self.where, copies))) or "-"


def read_state(gpus: Sequence[Gpu]) -> tuple[list[State], list[Pair]]:
    """The state of these GPUs and of the links between them; empty if the driver does not
    respond, and before the installation."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return [], []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # reported by gpus.inventory()
        return [], []
    try:
        handles = {
            g: handle
            for g in gpus
            if (handle := ask(pynvml.nvmlDeviceGetHandleByIndex, g.index)) is not None
        }
        states = [_state(pynvml, gpu, handle) for gpu, handle in handles.items()]
        order = list(handles)
        pairs = [
            _pair(pynvml, a.index, b.index, handles[a], handles[b])
            for n, a in enumerate(order)
            for b in order[n + 1 :]
        ]
    finally:
        pynvml.nvmlShutdown()
    return states, pairs


def _state(pynvml: Any, gpu: Gpu, handle: Any) -> State:
    rows = ask(pynvml.nvmlDeviceGetRemappedRows, handle)
    # cards before Ampere
    pages = ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle) if rows is None else None
    persistent = ask(pynvml.nvmlDeviceGetPersistenceMode, handle)
    return State(
        index=gpu.index,
        slowdowns=gpu.slowdowns,
        uncorrected_errors=ask(
            pynvml.nvmlDeviceGetTotalEccErrors,
            handle,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        ),
        remap_pending=bool(rows[2]) if rows else None if pages is None else bool(pages),
        remap_failed=bool(rows[3]) if rows else None,
        link_width=ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        link_width_most=ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        link_generation=ask(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        link_generation_most=ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        persistent=None if persistent is None else bool(persistent),
        nvlinks=_nvlinks(pynvml, handle),
    )


def _nvlinks(pynvml: Any, handle: Any) -> int | None:
    up = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        active = ask(pynvml.nvmlDeviceGetNvLinkState, handle, link)
        if active is None:  # past the last one
            break
        up.append(bool(active))
    return sum(up) if up else None


def _pair(pynvml: Any, first: int, second: int, one: Any, other: Any) -> Pair:
    level = ask(pynvml.nvmlDeviceGetTopologyCommonAncestor, one, other)
    nvlink = ask(pynvml.nvmlDeviceGetP2PStatus, one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    # 0: pynvml's constant for reading is a tuple by mistake (a trailing comma)
    direct = ask(pynvml.nvmlDeviceGetP2PStatus, one, other, 0)
    return Pair(
        first,
        second,
        None if level is None else WHERE.get(level),
        None if nvlink is None else nvlink == pynvml.NVML_P2P_STATUS_OK,
        None if direct is None else direct == pynvml.NVML_P2P_STATUS_OK,
    )
