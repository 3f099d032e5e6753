"""Real runs of two CPU ranks with an injected fault, and the time from the fault to the verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.e2e.conftest import Launched, launch  # noqa: F401 – the fixture
from training.core.rundir import read_records

RUN = ("bash", "./launch_train.sh", "2", "configs/dual_gpu/quickstart.py")
FLOOR_S = 3  # --hang_timeout
SECONDS = "fault to verdict"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Time of each fault (docs/faults.md)."""
    measured = [
        (dict(report.user_properties), report)
        for report in terminalreporter.stats.get("passed", [])
    ]
    lines = [
        f"{found[SECONDS]:6.2f} s  {report.nodeid.rpartition('::')[2]}"
        for found, report in measured
        if SECONDS in found
    ]
    if lines:
        terminalreporter.section("from the fault to the verdict")
        terminalreporter.line("\n".join(sorted(lines)))


@dataclass
class Ended:
    """A run that has ended. `injected`: the time of the fault, recorded by the fault itself."""

    run: Launched
    code: int
    events: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == kind]

    @property
    def injected(self) -> dict[str, Any]:
        (one,) = self.of("injected")
        return one

    @property
    def verdict(self) -> dict[str, Any]:
        """The first verdict: later ones are consequences of the same failure."""
        verdicts = self.of("verdict")
        assert verdicts, self.run.output[-3000:]
        return verdicts[0]

    @property
    def seconds(self) -> float:
        """Seconds from the fault to the verdict."""
        return float(self.verdict["time"] - self.injected["time"])

    @property
    def failure(self) -> dict[str, Any]:
        return self.run.failure


@pytest.fixture
def inject(launch: Callable[..., Launched]) -> Callable[..., Ended]:  # noqa: F811
    def go(
        spec: str, *, limit_s: float = 120.0, command: tuple[str, ...] = RUN, **flags: object
    ) -> Ended:
        run = launch(
            *command, **{"hang_timeout": FLOOR_S, "inject": spec, "num_iterations": 40, **flags}
        )
        code = run.wait(limit_s)
        return Ended(run, code, list(read_records(run.run.events)))

    return go


@pytest.fixture
def epochs(tmp_path: Path) -> dict[str, object]:
    """Data of ten steps an epoch, read by workers."""
    text = tmp_path / "small text.txt"
    text.write_bytes((ROOT / "LICENSE").read_bytes()[:1500])
    batch = {"device_batch_size": 2, "total_batch_size": 128}
    return {"data": text, "num_iterations": 0, "num_epochs": 3, "num_workers": 1, **batch}
