"""Lines that report how a training has ended, beside failures in the same log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cases import each
from tests.unit.diagnosed import OOM
from training.diagnose import progress_marks, result
from training.diagnose.log_parsers import end_detection

STEPS = "step 10 loss 3.2\nstep 20 loss 3.1\n"
THROWN = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\nKeyError: 0\n'
REPORTED = "torch/api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 7) of binary: python\n"


def diagnosed(text: str, folder: Path) -> dict[str, Any]:
    (folder / "log").write_text(text)
    return dict(result.diagnose([folder / "log"]))


@each(
    ("text", "cause"),
    [
        (STEPS + THROWN, "exception"),
        (STEPS + OOM, "gpu_oom"),
        (STEPS + "run.sh: line 12: 48213 Killed                  python train.py\n", "killed"),
        (STEPS + REPORTED, "peer_died"),
        (STEPS + THROWN + "step 30 loss 3.0\n", "none"),
        (THROWN + STEPS, "exception"),  # output that was written at the end of the process
        (THROWN + REPORTED + STEPS, "none"),  # restarted
    ],
)
def test_an_end_line_refutes_a_failure_only_after_further_steps(
    text: str, cause: str, tmp_path: Path
) -> None:
    assert diagnosed(f"{text}Job finished at Mon Jun 2\n", tmp_path)["cause"] == cause


@each(
    "end",
    [
        "Training finished. 3 samples failed to load",
        "Run finished: 120 passed, 2 failed",
        "All epochs done, failed uploads: 0",
        "Training complete. Best checkpoint of failed-seed-3 run saved",
        "Training completed with error rate 0.1",
        "training done, with 12 errors skipped",
    ],
)
def test_an_end_line_may_count_errors(end: str, tmp_path: Path) -> None:
    record = diagnosed(f"{STEPS}{end}\n", tmp_path)
    assert (record["cause"], record["confidence"]) == ("none", "high")


@each(
    "end",
    [
        "`Trainer.fit` stopped: `max_epochs=3` reached.",
        "{'train_runtime': 5.1, 'train_loss': 3.9, 'epoch': 2.0}",
        "training_seconds: 300.1",
        "3 epochs completed in 0.5 hours.",
    ],
)
def test_an_end_line_of_the_program_itself_refutes_a_failure(end: str, tmp_path: Path) -> None:
    assert diagnosed(f"{STEPS}{THROWN}{end}\n", tmp_path)["cause"] == "none"


@each("end", ["Training finished in 3 h", "Training finished in 3 h\nJob finished"])
def test_steps_after_a_logged_exception_may_look_as_if_they_came_from_a_buffer(
    end: str, tmp_path: Path
) -> None:
    steps = [f"step {n} loss 3.{n:03} lr 1.0e-04 time 12.1 s\n" for n in range(300)]
    assert len("".join(steps[:280])) > progress_marks.BLOCK
    text = "".join([*steps[:280], THROWN, *steps[280:], end, "\n"])
    assert end_detection.read(text) == (end_detection.FINISHED, None)
    assert diagnosed(text, tmp_path)["cause"] == "none"
