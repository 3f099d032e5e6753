"""Memory of a GPU that displays and other graphics hold: in the inventory and in the checks of a
start. After a run that was out of memory: test_launch_exhausted_gpu.py."""

from __future__ import annotations

import getpass
from dataclasses import replace
from typing import Any

import pytest

from tests.cases import each
from tests.unit.conftest import python
from tests.unit.nvidia_machine import Nvidia, look
from training.core.messages import msg
from training.host import gpu_choice
from training.host.gpu_processes import GpuProcess
from training.host.gpus import EXCLUSIVE, Gpu
from training.plan.preflight import one_gpu
from training.plan.preflight.report import ERROR, OK, WARNING
from training.tasks.gpt.memory import Estimate

GIB = 1 << 30
ME = getpass.getuser()
SERVER = GpuProcess(7, GIB // 2, "root", "/usr/lib/xorg/Xorg -core :0")
TINY = replace(SERVER, used_bytes=4 << 20)
BROWSER = GpuProcess(9, 9 * GIB, ME, "/opt/google/chrome/chrome --type=gpu-process")


def gpu(free_gib: float, *displays: GpuProcess, **more: Any) -> Gpu:
    facts = (32 * GIB, int(free_gib * GIB), 0, 40, 50.0)
    return Gpu(0, "GPU-0", "Fake", *facts, displays=displays, **more)


def check(one: Gpu, needed_gib: int = 10) -> tuple[str, str, list[str]]:
    estimate = Estimate(needed_gib * GIB, 0, 0, 0, 0, 0, 0, 0)
    found = one_gpu.check(one, estimate, ["smaller"], set(), measured=False)
    return found.status, found.text, found.fixes


def test_processes_that_only_draw_are_listed_apart(
    nvidia: Nvidia, old_driver: dict[str, str]
) -> None:
    facts = nvidia(PROCESSES="4712:1;4713:2", DISPLAYS="4711:9,4712:1")
    for variables in (facts, facts | old_driver):
        gpus: Any = look(variables).gpus
        assert [[p["pid"] for p in one.processes] for one in gpus] == [[4712], [4713]]
        assert [[p["pid"] for p in one.displays] for one in gpus] == [[4711], []]
        assert gpus[0].displays[0]["used_bytes"] == 9 * GIB
    code = "from training.host import gpus; print(len(gpus.inventory(displays=False).gpus[0].displays))"
    assert python("-c", code, **facts).stdout == "0\n"
    for unsupported in (nvidia(NOT_SUPPORTED=1), nvidia()):
        assert [tuple(one.displays) for one in look(unsupported).gpus] == [(), ()]


@each(
    ("free_gib", "displays", "status", "named"),
    [
        (31, [SERVER], OK, []),
        (22, [SERVER, BROWSER], WARNING, [9, 7]),  # much, though the run fits
        (12.5, [SERVER], WARNING, [7]),  # little is left
        (12.5, [TINY], WARNING, []),
        (13.499, [TINY], WARNING, [7]),  # without it the run is not tight
        (5, [TINY], ERROR, []),
        (5, [SERVER], ERROR, [7]),
        (5, [SERVER, BROWSER], ERROR, [9, 7]),
        (5, [], ERROR, []),
        (5, [GpuProcess(9, None, known=False)], ERROR, [9]),
    ],
)
def test_displays_are_named_where_their_memory_counts(
    free_gib: float, displays: list[GpuProcess], status: str, named: list[int]
) -> None:
    found, text, _ = check(gpu(free_gib, *displays))
    listed = msg("plan.gpus.drawn", processes="").strip("; ")
    assert (found, listed in text) == (status, bool(named))
    places = [text.index(f"pid {pid} ") for pid in named]
    assert places == sorted(places), "by memory"


@each(
    ("display", "killed"),
    [
        (BROWSER, True),
        (GpuProcess(9, 9 * GIB, "ann", "chrome"), False),
        (GpuProcess(9, GIB // 2, ME, "slack"), False),  # it would not help
        (GpuProcess(9, 2 * GIB, ME, "/usr/bin/gnome-shell"), False),
        (GpuProcess(9, 9 * GIB, known=False), False),
    ],
)
def test_the_user_may_end_only_own_programs(
    display: GpuProcess, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_gpu, "ROOT", "-")  # tests may run as root
    fixes = check(gpu(5, display))[2]
    assert [one.startswith("kill 9 ") for one in fixes[:-1]] == [True] * killed
    assert fixes[-1] == "smaller"


def test_programs_of_root_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_gpu, "ROOT", ME)
    assert check(gpu(5, BROWSER))[2] == ["smaller"]


def test_a_display_does_not_close_a_gpu() -> None:
    one = gpu(31, SERVER, compute_mode=EXCLUSIVE)
    assert check(one)[0] == OK and not gpu_choice.closed(one)
