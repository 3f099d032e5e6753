"""What is saved survives: a flipped bit, a full disk, a kill in the middle of a save."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.conftest import Launched
from tests.faults.conftest import RUN, Ended

Inject = Callable[..., Ended]
RESUME = ("./launch_train.sh", "2")


@pytest.mark.slow
def test_a_flipped_bit_is_noticed_and_the_checkpoint_before_is_used(inject: Inject, launch: Callable[..., Launched]) -> None:
    whole = launch(*RUN, num_iterations=20).ok()
    ended = inject("corrupt@step=8;kill@step=11", name="bit", num_iterations=20, save_every=4)
    assert ended.code == 4 and [e["fault"] for e in ended.of("injected")] == ["corrupt", "kill"]
    resumed = launch(*RESUME, tiny=False, resume="bit").ok()
    assert "damaged checkpoint skipped: step_00000008: state.pt does not match its checksum (a flipped bit?)" in resumed.output
    assert "resumed from step_00000004" in resumed.output
    assert resumed.losses == whole.losses


@pytest.mark.slow
def test_a_full_disk_in_the_middle_is_a_warning(inject: Inject) -> None:
    ended = inject("enospc@step=4", num_iterations=12, save_every=4)
    assert ended.code == 0, ended.run.output[-3000:]
    text = "checkpoint of step 4 was not saved: [Errno 28] No space left on device"
    assert text in ended.run.output and text in [e["text"] for e in ended.of("warning")]
    assert [e["step"] for e in ended.of("checkpoint")] == [8, 12]


@pytest.mark.slow
def test_killed_in_the_middle_of_a_save(inject: Inject, launch: Callable[..., Launched]) -> None:
    launch(*RUN, name="cut", num_iterations=4).ok()
    # Then the disk takes nothing any more; a second after the save of step 8 should have begun, the rank is gone.
    spec = "slow_disk@seconds=60;slow@rank=0,step=9,phase=fetch,seconds=1;kill@rank=0,step=9"
    ended = inject(spec, command=RESUME, tiny=False, resume="cut", num_iterations=12, save_every=4)
    assert ended.code == 4
    checkpoints = ended.run.run.checkpoints
    assert [p.name for p in checkpoints.glob("step_*")] == ["step_00000004"] and list(checkpoints.glob(".writing-*")), "in the middle of 8"
    resumed = launch(*RESUME, tiny=False, resume="cut").ok()
    assert "resumed from step_00000004" in resumed.output and not list(checkpoints.glob(".writing-*"))
    assert max(resumed.steps) == 12
