"""Which GPUs are used if more are visible than the launch has ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cases import each
from tests.unit.nvidia_machine import BALANCED, Nvidia, dry_run
from training.core.messages import msg
from training.host import gpu_choice, gpus
from training.host.gpu_choice import emptiest, emptiest_gpus, numbering
from training.host.gpu_processes import GpuProcess
from training.host.gpus import EXCLUSIVE, PROHIBITED, VISIBLE, Gpu, GpuInventory

GIB = 1 << 30


def gpu(
    index: int, free: float | None, use: int | None = 0, *, total: int = 80, **facts: Any
) -> Gpu:
    bytes_ = None if free is None else int(free * GIB)
    return Gpu(index, f"GPU-{index}", "-", total * GIB, bytes_, use, None, None, **facts)


BUSY = (GpuProcess(1, GIB),)


@each(
    ("every", "chosen"),
    [
        ([gpu(0, 79), gpu(1, 79), gpu(2, 79)], [0, 1]),
        ([gpu(0, 78.4), gpu(1, 79.1), gpu(2, 79.3)], [0, 1]),  # a display on the first one
        ([gpu(0, 10), gpu(1, 79), gpu(2, 79)], [1, 2]),
        ([gpu(0, 10), gpu(1, 79), gpu(2, 40)], [1, 2]),
        ([gpu(0, 79, 95), gpu(1, 79, 3), gpu(2, 79, 0)], [1, 2]),
        ([gpu(0, 79, 5), gpu(1, 79, None), gpu(2, 79, 0)], [0, 1]),
        ([gpu(0, 79, 95), gpu(1, 40, 0), gpu(2, 79, 0)], [0, 2]),  # memory comes first
        ([gpu(0, 79, compute_mode=PROHIBITED), gpu(1, 5), gpu(2, 5)], [1, 2]),
        ([gpu(0, 79, compute_mode=EXCLUSIVE, processes=BUSY), gpu(1, 5), gpu(2, 5)], [1, 2]),
        ([gpu(0, 79, compute_mode=EXCLUSIVE), gpu(1, 5), gpu(2, 5)], [0, 1]),
        # larger, but without matrix units: only if another one is more than half full
        ([gpu(0, 79, capability=(6, 1)), gpu(1, 45, capability=(8, 9)), gpu(2, 5)], [0, 1]),
        ([gpu(0, 79, capability=(6, 1)), gpu(1, 45, capability=(8, 9)), gpu(2, 44)], [1, 2]),
        # a display on the newest one
        (
            [
                gpu(0, 79, capability=(8, 6)),
                gpu(1, 79, capability=(8, 6)),
                gpu(2, 74, capability=(8, 9)),
            ],
            [0, 2],
        ),
        (
            [
                gpu(0, 79, capability=(8, 6)),
                gpu(1, 79, capability=(8, 6)),
                gpu(2, 60, capability=(8, 9)),
            ],
            [0, 1],
        ),
    ],
)
def test_memory_then_utilisation_then_order(every: list[Gpu], chosen: list[int]) -> None:
    assert [found.index for found in emptiest(every, 2)] == chosen


def card(index: int, total: int, capability: tuple[int, int], share: float = 0.98) -> Gpu:
    return gpu(index, share * total, total=total, capability=capability)


V100, A400, RTX_2070 = (32, (7, 0)), (4, (8, 6)), (8, (7, 5))
P40, RTX_3060 = (24, (6, 1)), (12, (8, 6))


@each(
    ("every", "count", "chosen"),
    [
        ([card(0, *A400), card(1, *V100), card(2, *V100)], 1, [1]),
        ([card(0, *A400), card(1, *V100), card(2, *V100)], 2, [1, 2]),
        ([card(0, *A400), card(1, *V100), card(2, *V100)], 3, [0, 1, 2]),
        # one card of half the memory, also with a display, is enough for matrix units
        ([card(0, *P40), card(1, *RTX_3060)], 1, [1]),
        ([card(0, *P40), card(1, *RTX_3060, share=0.9)], 1, [1]),
        # a pair has the memory of its smaller card
        ([card(0, *P40), card(1, *RTX_2070), card(2, *RTX_2070)], 1, [0]),
        ([card(0, *P40), card(1, *RTX_2070), card(2, *RTX_2070)], 2, [1, 2]),
        ([card(0, *P40), card(1, *RTX_3060), card(2, *P40)], 2, [0, 2]),
    ],
)
def test_the_weakest_card_decides_the_precision_and_the_smallest_the_memory(
    every: list[Gpu], count: int, chosen: list[int]
) -> None:
    assert [found.index for found in emptiest(every, count)] == chosen


EVERY = (gpu(0, 5), gpu(1, 79), gpu(2, 30), gpu(3, 79))


def test_the_others_are_hidden_or_follow() -> None:
    machine = GpuInventory(EVERY, "4 on this machine", "580", "13.0")
    hidden = emptiest_gpus(machine, 2, {}, hide=True)
    assert hidden.visible == "1,3" and hidden.environ({})[VISIBLE] == "1,3"
    assert [g.index for g in hidden.machine.gpus] == [1, 3]
    assert hidden.machine.reason == hidden.why and "79" in hidden.why
    follow = emptiest_gpus(machine, 2, {}, hide=False)
    assert follow.visible == "1,3,0,2", "a script may use more than one GPU in a rank"
    assert follow.machine.driver == "580"


def test_the_gpus_left_out_still_count() -> None:
    machine = GpuInventory(EVERY, "-")
    for hide, spare in ((True, 2), (False, 0)):
        found = emptiest_gpus(machine, 2, {}, hide=hide).machine
        assert (len(found.gpus) + found.spare, found.spare) == (4, spare)


@each(
    ("damaged", "chosen"),
    [
        ({0}, [1, 3]),
        ({0, 1}, [2, 3]),
        ({0, 1, 3}, [0, 2]),  # one sound GPU alone is not enough
        ({0, 1, 2, 3}, [0, 1]),
    ],
)
def test_a_damaged_gpu_is_used_only_if_needed(damaged: set[int], chosen: list[int]) -> None:
    every = [gpu(0, 79), gpu(1, 79), gpu(2, 60), gpu(3, 79)]
    assert [one.index for one in emptiest(every, 2, damaged=damaged)] == chosen
    full = [gpu(0, 79), gpu(1, 5), gpu(2, 79)]
    assert [one.index for one in emptiest(full, 2, damaged={0})] == [0, 2], "not half empty"


def test_the_reason_is_what_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    alike = tuple(gpu(n, 79, nvlinks=4, capability=(8, 6)) for n in range(4))
    monkeypatch.setattr(gpu_choice, "_described", lambda gpu: str(gpu.index))

    def why(every: tuple[Gpu, ...]) -> str:
        return emptiest_gpus(GpuInventory(every, "-"), 2, {}, hide=True).why

    def names(chosen: str, first: str) -> dict[str, Any]:
        return {"chosen": chosen, "first": first, "count": 4}

    monkeypatch.setattr(gpu_choice.gpu_damage, "damaged", lambda indices: set())
    monkeypatch.setattr(gpu_choice.nvlink, "pairs", lambda indices: set())
    newer = (*alike[:3], replace(alike[3], capability=(8, 9)))
    assert why(newer) == msg("host.gpus.newest", **names("0, 3", "1"))
    assert why(EVERY) == msg("host.gpus.emptiest", **names("1, 3", "0"))
    monkeypatch.setattr(gpu_choice.nvlink, "pairs", lambda indices: {frozenset((2, 3))})
    assert why(alike) == msg("host.gpus.linked", **names("2, 3", "0, 1"))
    monkeypatch.setattr(gpu_choice.nvlink, "pairs", lambda indices: set())
    monkeypatch.setattr(gpu_choice.gpu_damage, "damaged", lambda indices: {0})
    assert why(alike) == msg("host.gpus.sound", avoided="0", **names("1, 2", "0"))


def test_the_only_pair_with_nvlink_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_choice.gpu_damage, "damaged", lambda indices: set())
    monkeypatch.setattr(gpu_choice.nvlink, "pairs", lambda indices: {frozenset((1, 2))})
    for alone in (0, None):
        every = (gpu(0, 79, nvlinks=alone), gpu(1, 79, nvlinks=4), gpu(2, 79, nvlinks=4))
        assert emptiest_gpus(GpuInventory(every, "-"), 2, {}, hide=True).visible == "1,2"


def test_beside_a_lost_gpu_the_chosen_ones_are_named_by_uuid() -> None:
    """The driver counts GPU 1, which does not answer; CUDA may number the others without it."""
    machine = GpuInventory((EVERY[0], *EVERY[2:]), "-")
    assert emptiest_gpus(machine, 2, {}, hide=True).visible == "GPU-2,GPU-3"
    assert emptiest_gpus(machine, 2, {}, hide=False).visible == "GPU-2,GPU-3,GPU-0"


def test_beside_a_lost_gpu_those_at_the_front_are_named_too() -> None:
    for every, ranks in ((EVERY[1:], 1), ((EVERY[1], EVERY[3]), 2)):
        choice = emptiest_gpus(GpuInventory(every, "-"), ranks, {}, hide=True)
        assert choice.visible == ",".join(gpu.uuid for gpu in every[:ranks])
    unnamed = (replace(EVERY[1], uuid="-"), replace(EVERY[3], uuid="-"))
    assert emptiest_gpus(GpuInventory(unnamed, "-"), 2, {}, hide=True).visible is None


@pytest.mark.parametrize("other", [gpu(0, None), gpu(0, 79, mig=True)])
def test_enough_whole_gpus_of_known_memory_are_chosen_among(other: Gpu) -> None:
    machine = GpuInventory((other, *EVERY[1:]), "-")
    assert emptiest_gpus(machine, 2, {}, hide=True).visible == "GPU-1,GPU-3"
    follow = emptiest_gpus(machine, 2, {}, hide=False).machine.gpus
    assert [g.index for g in follow if g.mig] == []
    assert [g.index for g in follow][:2] == [1, 3]


@pytest.mark.parametrize(
    ("environ", "every", "ranks"),
    [
        ({VISIBLE: "0,2,3"}, EVERY, 2),
        ({VISIBLE: ""}, EVERY, 2),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, EVERY, 2),
        ({}, EVERY, 4),
        ({}, EVERY, 5),
        ({}, (), 1),
        ({}, (gpu(0, 79), gpu(1, None)), 2),
        ({}, (gpu(0, 79), gpu(1, 79, mig=True)), 2),
        ({}, (gpu(0, 79), gpu(1, 5)), 1),
    ],
)
def test_otherwise_nothing_is_changed(
    environ: dict[str, str], every: tuple[Gpu, ...], ranks: int
) -> None:
    machine = GpuInventory(every, "-")
    choice = emptiest_gpus(machine, ranks, environ, hide=True)
    assert (choice.machine, choice.visible) == (machine, None)
    assert choice.environ(environ) is environ


@pytest.mark.parametrize(
    ("environ", "names", "noted"),
    [
        ({}, "ab", False),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, "ab", False),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "aa", False),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST", VISIBLE: "GPU-1,GPU-2"}, "ab", False),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST", VISIBLE: "1,0"}, "ab", True),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "ab", True),
    ],
)
def test_another_numbering_of_different_gpus_is_noted(
    environ: dict[str, str], names: str, noted: bool
) -> None:
    every = tuple(replace(gpu(n, 10), name=name) for n, name in enumerate(names))
    assert bool(numbering(GpuInventory(every, ""), environ)) == noted


@each(
    ("selected", "facts", "suggested"),
    [
        ("0,1", {"FREE_GIB": "31,0.2,31,31"}, True),
        ("0,1,2", {"FREE_GIB": "31,0.2,31,31"}, True),  # the first two are used
        ("0,1", {"PROCESSES": ";4712:1"}, True),  # enough memory, but shared
        ("0,1", {"FREE_GIB": "31,0.2,0.2,0.2"}, False),
        ("0,1", {"FREE_GIB": "31,0.2,31,31", "PROCESSES": "4711:1;;4712:1;4713:1"}, False),
        ("0,1", {"FREE_GIB": "31,0.2,31,31", "COUNT": 2}, False),
        (None, {"FREE_GIB": "31,0.2", "COUNT": 2}, False),
    ],
)
def test_idle_gpus_beside_the_selected_ones_are_the_first_suggestion(
    selected: str | None, facts: dict[str, Any], suggested: bool, nvidia: Nvidia
) -> None:
    chosen = {VISIBLE: selected} if selected else {}
    shown = dry_run(nvidia(**{"COUNT": 4} | chosen | facts), BALANCED).stdout
    first = shown.partition("GPU 1  ")[2].partition("try: ")[2].splitlines()[:1]
    assert (first == [f"env -u {VISIBLE} ./train_dual_gpu.sh {BALANCED} --dry_run"]) is suggested


def test_mps_is_known_by_its_pipe_where_the_processes_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def closed(**facts: Any) -> bool:
        one = GpuProcess(1, GIB, **facts)
        return gpu_choice.closed(gpu(0, 79, compute_mode=EXCLUSIVE, processes=(one,)))

    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert closed(known=False)
    (tmp_path / "control").touch()
    assert not closed(known=False)
    assert closed(command="python train.py")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
    monkeypatch.setattr(gpus, "MPS_USUAL", str(tmp_path))
    assert not closed(known=False)
