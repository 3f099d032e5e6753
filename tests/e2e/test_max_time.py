"""--max_time on two ranks: a normal end, and a resume that counts the time already used."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.conftest import Launched
from training.config.schema import Config
from training.core import manifest

RUN = ("./launch_train.sh", "2", "configs/dual_gpu/quickstart.py")
LIMIT_S, LONGER_S = 4.0, 6.0
LATE_S = 3.0  # one step on a busy machine


@pytest.mark.slow
def test_a_time_limit_ends_a_run_with_the_decay_done(launch: Callable[..., Launched]) -> None:
    flags = {"depth": 1, "max_seq_len": 16, "device_batch_size": 1, "total_batch_size": 32}
    flags |= {"num_iterations": 0, "eval_every": 10**6, "save_every": 0}
    run = launch(*RUN, name="timed", max_time=f"{LIMIT_S:g}s", **flags).ok()
    steps = [record for _, record in sorted(run.steps.items())]
    used = [record["used_s"] for record in steps]
    assert used == sorted(used)
    assert LIMIT_S / 2 < used[-1] < LIMIT_S + LATE_S
    # at the last step as at the end of any schedule
    last, peak, final = steps[-1]["lr"], max(r["lr"] for r in steps), Config().final_lr_frac
    assert final <= last / peak < 0.4
    assert run.summary["status"] == "done" and "val_bpb_last" in run.summary
    saved = manifest.newest(run.run.checkpoints)
    assert saved and (saved["step"], saved["used_s"]) == (
        steps[-1]["step"],
        pytest.approx(used[-1], abs=1e-3),
    )

    assert "finished" in launch(*RUN[:2], tiny=False, resume="timed").ok().output
    more = launch(*RUN[:2], tiny=False, resume="timed", max_time=LONGER_S).ok()
    later = [r for _, r in sorted(more.steps.items()) if r["step"] > steps[-1]["step"]]
    assert used[-1] <= later[0]["used_s"] < later[-1]["used_s"] < LONGER_S + LATE_S
    assert later[-1]["lr"] < later[0]["lr"]
