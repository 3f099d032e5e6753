"""A run directory that is removed while its run trains."""

from __future__ import annotations

import shutil

import pytest

from tests.conftest import wait_until
from tests.e2e.conftest import Launcher
from tests.e2e.test_failures import RUN


@pytest.mark.parametrize(
    "retries", [pytest.param(0, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.slow)]
)
def test_a_run_directory_that_is_removed(launch: Launcher, retries: int) -> None:
    run = launch(*RUN, num_iterations=4000, save_every=5, retries=retries)
    wait_until(lambda: len(run.steps) > 5, 60, "steps")
    # at once: rmtree meets files that are just being written
    removed = run.run.path.rename(run.run.path.parent / "removed")
    shutil.rmtree(removed, ignore_errors=True)
    assert run.wait(30) == 4, run.output
    assert f"the run directory {run.run.path} has disappeared" in run.output
    assert "Cause" not in run.output and "Traceback" not in run.output, (
        "no card that names a folder which is gone"
    )
    assert run.output.count("try:") == 1
    assert not run.run.path.exists(), "nothing is made again"
