"""Power of the GPUs and joules per token, from the driver to report and monitor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.conftest import python
from tests.unit.report_runs import planned, trained
from training.core import metric_units, units
from training.host.placement import RANK, Topology
from training.monitor import sections, state
from training.monitor.report import headline
from training.monitor.report.run import read_run
from training.trainer import power

Nvidia = Callable[..., dict[str, Any]]
UUIDS = [f"GPU-{number:08x}-0000-4000-8000-000000000000" for number in (0xA0, 0xA1)]
READ = """
import sys, time
from training.trainer import power
power.EVERY_S = 0.1
meter = power.PowerMeter(sys.argv[2:])
end = time.monotonic() + float(sys.argv[1])
while not meter.watts(0.3) and time.monotonic() < end and meter.thread.is_alive():
    time.sleep(0.01)
print(meter.watts(0.3))
"""


@pytest.mark.parametrize(
    ("driver", "uuids", "watts"),
    [
        ({"ENERGY": "300,200", "POWER": "1,1"}, UUIDS, 500),  # the counter is more exact
        ({"POWER": "431,70"}, UUIDS, 501),
        ({"POWER": "431,70"}, UUIDS[1:], 70),
        ({"NOT_SUPPORTED": 1}, UUIDS, None),
        ({"COUNT": 1, "POWER": "431"}, UUIDS, None),  # the other GPU is lost
    ],
)
def test_power_of_all_gpus(
    nvidia: Nvidia, driver: dict[str, Any], uuids: list[str], watts: float | None
) -> None:
    limit_s = "1" if watts is None else "10"
    done = python("-c", READ, limit_s, *uuids, **nvidia(**driver))
    assert done.stderr == ""
    found = None if done.stdout == "None\n" else float(done.stdout)
    assert found == (None if watts is None else pytest.approx(watts, rel=0.02))


def test_without_a_driver_the_power_is_unknown() -> None:
    meter = power.PowerMeter(UUIDS[:1])
    meter.thread.join(10)
    assert not meter.thread.is_alive() and meter.watts(1.0) is None


def joules(seconds: float, step_s: float) -> float:
    """300 W in the first two thirds of each step, then 60 W: a mean of 220 W."""
    steps, within = divmod(seconds / step_s, 1)
    return step_s * (220 * steps + 300 * min(within, 2 / 3) + 60 * max(0, within - 2 / 3))


@pytest.mark.parametrize("step_s", [0.7, 1.3, 3.0, 40.0])
def test_the_power_is_that_of_whole_steps(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    now = 0.0
    monkeypatch.setattr(power, "time", SimpleNamespace(monotonic=lambda: now))
    meter = power.PowerMeter(UUIDS[:1])  # without a driver
    found = []
    for sample in range(1, 801):
        before, now = now, power.EVERY_S * sample
        meter._add([joules(now, step_s) - joules(before, step_s)])
        if now % step_s < power.EVERY_S and now > step_s + 1:  # a step has just ended
            found.append(meter.watts(step_s))
    assert len(found) > 2 and found == pytest.approx([220] * len(found), rel=0.06)
    now += power.STALE_S + 1
    assert meter.watts(step_s) is None


def test_the_power_is_unknown_for_a_while_after_a_gpu_did_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(power, "time", SimpleNamespace(monotonic=lambda: now))
    meter = power.PowerMeter(UUIDS)
    for used in ([10.0, 20.0], [10.0, None], *[[100.0, 200.0]] * 3):
        now += 0.5
        meter._add(used)
    assert meter.watts(0.1) == pytest.approx(600)
    meter._add([None, 5.0])
    assert meter.watts(0.1) is None


@pytest.mark.parametrize(
    ("device", "local", "world", "known", "mig"),
    [
        ("cpu", 2, 2, 2, None),
        ("cuda", 2, 4, 2, False),
        ("cuda", 1, 1, 1, False),
        ("cuda", 2, 2, 0, False),
        ("cuda", 2, 2, 2, True),  # the driver counts the energy of the whole GPU
    ],
)
def test_only_a_complete_figure_of_the_run_is_measured(
    device: str, local: int, world: int, known: int, mig: bool | None
) -> None:
    place = Topology(RANK, "", "", world_size=world, local_world_size=known).record()
    gpus = [{"uuid": UUIDS[0], "mig": mig}, {"uuid": UUIDS[1], "mig": False}]
    plan: Any = {"device": {"value": device}, "gpus": gpus, "place": place, "local_ranks": local}
    assert power.meter(plan, world) is None


@pytest.mark.parametrize("known", [True, False])
def test_report_and_monitor_show_it_where_it_is_known(tmp_path: Path, known: bool) -> None:
    made = trained(planned(tmp_path / "run"), 60)
    if known:
        for step in range(61, 121):
            made.step(step, 2.0, joules_per_unit=0.0123, power_w=500.0)
    shown = " ".join(str(note) for _, _, note in headline.figures(read_run(made.run)))
    assert ("J/token" in shown) == known and ("0.0123" in shown) == known
    curve = read_run(made.run).metrics.curves.get("power_w")
    assert (curve is not None) == known and not (curve and curve.marks)
    seen = state.RunWatch(made.run).read(patience_s=0.0)
    assert seen["training"]["joules_per_unit"] == (0.0123 if known else None)
    screen = "".join(str(line) for line in sections.numbers(seen, 200, 20))
    assert ("0.0123 J" in screen) == known


def test_units() -> None:
    assert [units.joules(value) for value in (0.012345, 3.0, 45_600)] == [
        "0.0123 J",
        "3 J",
        "45.6 kJ",
    ]
    assert [metric_units.one(unit) for unit in ("tokens", "clips", None)] == [
        "token",
        "clip",
        "token",
    ]
