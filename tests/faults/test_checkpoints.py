"""Checkpoints survive a flipped bit, a full disk, and a kill in the middle of a save."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Launched
from tests.faults.conftest import RUN, Ended
from training.core.rundir import read_records
from training.trainer import checkpoint

Inject = Callable[..., Ended]
RESUME = ("./launch_train.sh", "2")


@pytest.mark.slow
def test_a_checkpoint_with_a_flipped_bit_is_skipped(
    inject: Inject, launch: Callable[..., Launched]
) -> None:
    whole = launch(*RUN, num_iterations=20).ok()
    ended = inject("corrupt@step=8;kill@step=11", name="bit", num_iterations=20, save_every=4)
    # in any order: rank 0 writes the checkpoint beside its steps
    assert ended.code == 4 and {e["fault"] for e in ended.of("injected")} == {"corrupt", "kill"}
    resumed = launch(*RESUME, tiny=False, resume="bit").ok()
    assert (
        "damaged checkpoint skipped: step_00000008: state.pt does not match its checksum (a "
        "flipped bit?)" in resumed.output
    )
    assert "resumed from step_00000004" in resumed.output
    assert resumed.losses == whole.losses


@pytest.mark.slow
def test_a_full_disk_in_the_middle_is_a_warning(inject: Inject) -> None:
    ended = inject("enospc@step=4", num_iterations=12, save_every=4)
    assert ended.code == 0, ended.run.output[-3000:]
    (text,) = (e["text"] for e in ended.of("warning"))
    assert (
        text.startswith("checkpoint of step 4 was not saved: [Errno 28] No space left on device; ")
        and text in ended.run.output
    )
    assert f"free in {ended.run.run.checkpoints}: " in text and "df -h " in text
    assert [e["step"] for e in ended.of("checkpoint")] == [8, 12]


@pytest.mark.soak
def test_a_disk_that_stays_full_stops_the_run(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    """A small file system, filled after the first checkpoint."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no private mount namespace here (unshare -m)")
    (runs := tmp_path / "experiments").mkdir()
    script = """mount -t tmpfs -o size=100m none "$1" && runs=$1 kept=$2 && shift 2
        ( until [[ -d $runs/full/checkpoints/step_00000004 ]]; do sleep 0.05; done; head -c 1G /dev/zero >"$runs/fill" ) 2>/dev/null &
        "$@"; code=$?
        kill %1 2>/dev/null; cp -r "$runs/full/checkpoints" "$kept"; exit "$code" """
    inside = ("unshare", "-m", "bash", "-c", script, "bash", str(runs), str(tmp_path / "kept"))
    run = launch(*inside, *RUN, name="full", num_iterations=4000, save_every=4, keep_checkpoints=1)
    assert run.wait() == 3, run.output[-3000:]
    assert (
        "two checkpoints in a row were not saved" in run.output
        and f"df -h {shlex.quote(f'{runs}/full/checkpoints')}" in run.output
    )
    found = checkpoint.latest(tmp_path / "kept")
    assert found and not found.skipped and found.position.step >= 4
    assert f"the newest checkpoint is from step {found.position.step} (exit 3)" in run.output


@pytest.mark.soak
def test_killed_in_the_middle_of_a_save(inject: Inject, launch: Callable[..., Launched]) -> None:
    launch(*RUN, name="cut", num_iterations=4).ok()
    # Then the disk accepts no more data; the rank is killed a second after the save of step 8
    # should have started.
    spec = "slow_disk@seconds=60;slow@rank=0,step=9,phase=fetch,seconds=1;kill@rank=0,step=9"
    ended = inject(spec, command=RESUME, tiny=False, resume="cut", num_iterations=12, save_every=4)
    assert ended.code == 4
    checkpoints = ended.run.run.checkpoints
    assert [p.name for p in checkpoints.glob("step_*")] == ["step_00000004"] and list(
        checkpoints.glob(".writing-*")
    ), "in the middle of 8"
    resumed = launch(*RESUME, tiny=False, resume="cut").ok()
    assert "resumed from step_00000004" in resumed.output and not list(
        checkpoints.glob(".writing-*")
    )
    (skipped,) = (
        e["text"]
        for e in read_records(resumed.run.events)
        if e["event"] == "warning" and e["code"] == "warning.checkpoint_skipped"
    )
    assert "checkpoint of step 8 skipped" in skipped and "from step 4" in skipped
    assert skipped in resumed.output
    assert max(resumed.steps) == 12
