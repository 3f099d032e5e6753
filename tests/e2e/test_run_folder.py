"""Removal of the run directory during training."""

from __future__ import annotations

import shutil

import pytest

from tests.conftest import wait_until
from tests.e2e.conftest import Launcher
from tests.e2e.test_failures import RUN


@pytest.mark.parametrize(
    "retries", [pytest.param(0, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.slow)]
)
def test_a_removed_run_directory_ends_the_run(launch: Launcher, retries: int) -> None:
    run = launch(*RUN, num_iterations=4000, save_every=5, retries=retries)
    wait_until(lambda: len(run.steps) > 5, what="steps")
    # in one step: rmtree would meet files being written
    removed = run.run.path.rename(run.run.path.parent / "removed")
    shutil.rmtree(removed, ignore_errors=True)
    assert run.wait() == 4, run.output
    assert f"the run directory {run.run.path} has disappeared" in run.output
    assert "Cause" not in run.output and "Traceback" not in run.output, (
        "no card with a path that no longer exists"
    )
    assert run.output.count("try:") == 1
    assert not run.run.path.exists(), "nothing is recreated"
