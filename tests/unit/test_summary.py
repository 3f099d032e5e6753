"""The last screen of a run, and the commands in it."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conftest import ENHANCED, LAUNCH, SIMPLE, TRAIN, Shell
from tests.unit.finished_runs import plan, run
from training.config.schema import shared
from training.core import metric_units
from training.core.messages import msg
from training.core.next_command import next_command
from training.core.rundir import RunDir, write_json
from training.trainer.summary import longer, render

__all__ = ["run"]  # a fixture

FACTS = {
    "status": "done",
    "exit_code": 0,
    "seconds": 75.2,
    "steps": 400,
    "tokens": 1_638_400,
    "parameters": 450_000,
    "loss_first": math.log(2) * 8,
    "loss_last": math.log(2) * 3,
    "bytes_per_token": 1.0,
    "val_bpb_first": 8.1,
    "val_bpb_last": 3.25,
    "tokens_per_s": 12345.6,
    "step_ms": 331.84,
    "checkpoint": "step_00000400",
    "sample": "def f():\n    pass\n",
}


def screen(run: RunDir, plan: dict[str, Any], **facts: Any) -> str:
    write_json(run.summary, FACTS | facts)
    return render(run, plan)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_a_generated_word_that_is_also_a_number(run: RunDir, word: str) -> None:
    assert f"    │ {word}\n" in screen(run, plan(), sample=word)


def test_what_was_trained_how_well_and_where_it_is(run: RunDir) -> None:
    (run.checkpoints / "step_00000400").mkdir()
    run.metrics.touch()
    text = screen(run, plan())
    for part in (
        "GPT, depth 12, 0.45 M parameters",
        "400 steps, 1.64 M tokens of stdlib in 1 min 15 s, 2 × cpu",
        "8.000 → 3.000 bits/byte; validation 8.100 → 3.250 bits/byte\n",
        "12,346 tokens/s, 331.8 ms per step",
        "    │ def f():\n",
        f"Run        {run.path}\n",
        "plan.json, metrics.jsonl, checkpoints/step_00000400",
        "Log        /logs/x.log",
    ):
        assert part in text
    assert text.endswith("\n")


VIDEO = {
    "status": "done",
    "exit_code": 0,
    "seconds": 75.2,
    "steps": 300,
    "samples": 4800,
    "parameters": 123_456,
    "loss_first": 0.05231,
    "loss_last": 0.004117,
    "val_psnr_first": 27.1,
    "val_psnr_last": 29.83,
    "val_ssim_first": 0.871,
    "val_ssim_last": 0.9134,
    "val_psnr_input_first": 25.31,
    "val_psnr_input_last": 25.31,
    "samples_per_s": 3.2689,
    "step_ms": 4894.6,
    "mfu": None,
    "checkpoint": "step_00000300",
    "sample": "4 clips\n  of 6 frames",
}


def plan_of(task: str, **options: Any) -> dict[str, Any]:
    """Of another task than gpt: none of the fields that gpt alone has, no data, no estimate of the
    memory."""
    made = plan()
    made["config"] = {name: value for name, value in made["config"].items() if shared(name)}
    made["task"] = {"name": task, "unit": "samples", "file": None, "options": options}
    return {key: value for key, value in made.items() if key != "data"}


def test_the_summary_of_another_task(run: RunDir, shell: Shell) -> None:
    write_json(run.summary, VIDEO)
    run.samples.mkdir()
    text = render(run, plan_of("video_restoration", dataroot_gt="data/moving"))
    for part in (
        "  Model      video_restoration, 0.12 M parameters\n",
        "  Trained    300 steps, 4,800 samples of data/moving in 1 min 15 s, 2 × cpu\n",
        "  Loss       0.05231 → 0.004117; validation psnr 27.1 → 29.83 dB, ssim 0.871 → 0.9134, "
        "psnr input 25.31 dB\n",
        "  Speed      3.27 samples/s, 4894.6 ms per step (medians)\n",
        "      │ 4 clips\n      │   of 6 frames\n",
        "plan.json, samples/",
    ):
        assert part in text, part
    assert "token" not in text and "bits" not in text
    assert shell.read(next_line(text)).config.num_iterations == 800


def test_a_task_with_few_facts(run: RunDir) -> None:
    write_json(
        run.summary,
        {
            name: None if name == "sample" else value
            for name, value in VIDEO.items()
            if "val_" not in name
        },
    )
    text = render(run, plan_of("mine"))
    assert "Model      mine, 0.12 M" in text and "300 steps, 4,800 samples in 1 min 15 s" in text
    assert "Loss       0.05231 → 0.004117\n" in text and "Sample" not in text
    own = {name.replace("samples", "clips"): value for name, value in VIDEO.items()}
    write_json(run.summary, own)
    text = render(run, plan_of("mine"))
    assert (
        "300 steps, 4,800 clips in 1 min 15 s" in text
        and "Speed      3.27 clips/s, 4894.6 ms" in text
    )


def test_without_a_summary_there_is_nothing_to_show(run: RunDir) -> None:
    assert render(run, plan()) == ""


def test_what_was_not_measured_is_left_out(run: RunDir) -> None:
    text = screen(run, plan(), val_bpb_first=None, val_bpb_last=None, sample=None)
    assert "validation" not in text
    assert "Sample" not in text


def test_the_use_of_the_gpu_where_it_is_known(run: RunDir) -> None:
    assert "331.8 ms per step, 41.3 % of the GPU's arithmetic (MFU) (medians)\n" in screen(
        run, plan(), mfu=0.4126
    )
    tiny = msg("trainer.summary.mfu", percent=msg("core.units.below", bound="0.1 %"))
    assert f"{tiny} (medians)\n" in screen(run, plan(), mfu=0.0004)
    for facts in ({}, {"mfu": None}):
        assert "331.8 ms per step (medians)\n" in screen(run, plan(), **facts)


def test_the_energy_of_a_token_where_it_is_measured(run: RunDir) -> None:
    text = screen(run, plan(), mfu=0.4126, joules_per_unit=0.0123)
    assert "331.8 ms per step, 41.3 % of the GPU's arithmetic (MFU), 0.0123 J/token (m" in text
    text = screen(run, plan(), joules_per_unit=None)
    assert "331.8 ms per step (medians)" in text


def test_the_memory_of_a_gpu_beside_its_estimate(run: RunDir) -> None:
    gib = 1 << 30
    planned = {"total_bytes": 27 * gib, "context_bytes": gib}
    on_gpu = plan() | {"device": {"value": "cuda"}, "memory": planned}
    shown = "Memory     25.0 GiB per GPU at most, estimated 26.0 GiB"
    assert f"{shown}\n" in screen(run, on_gpu, memory_bytes=25 * gib)
    on_gpu["reported_memory"] = "28–30 GB"
    assert f"{shown}; the original authors report 28–30 GB" in screen(
        run, on_gpu, memory_bytes=25 * gib
    )
    on_cpu = on_gpu | {"device": {"value": "cpu"}}
    for other, facts in ((on_gpu, {}), (on_cpu, {"memory_bytes": gib})):
        assert "Memory" not in screen(run, other, **facts)
    on_gpu["memory"] = {"total_bytes": gib + (43 << 20), "context_bytes": gib}
    small = "Memory     41 MiB per GPU at most, estimated 43 MiB"
    assert small in screen(run, on_gpu, memory_bytes=41 << 20)


def test_the_report_is_named_where_there_is_one(run: RunDir) -> None:
    assert "Report" not in screen(run, plan())
    run.report.touch()
    assert f"\n  Report     {run.report}\n" in screen(run, plan())
    os.utime(run.report, (1, 1))  # of an earlier start: deleted if the new one is not made in time
    assert "Report" not in screen(run, plan() | {"created": 100.0})


def test_loss_and_validation_have_one_unit(run: RunDir) -> None:
    text = screen(run, plan(tokenizer="bpe"), bytes_per_token=4.0)
    assert "Loss       2.000 → 0.750 bits/byte; validation 8.100 → 3.250 bits/byte\n" in text
    old = screen(run, plan(tokenizer="bpe"), bytes_per_token=None)  # from before that was recorded
    assert "5.545 → 2.079 nats/token; validation 8.100 → 3.250 bits/byte\n" in old


def test_the_ends_of_a_loss_are_means(run: RunDir) -> None:
    """Single batches of a noisy loss do not show its course."""
    losses = [0.045, *(0.06 - step / 10_000 + 0.01 * (-1) ** step for step in range(398)), 0.053]
    begin, end = metric_units.ends(losses)
    assert losses[0] < losses[-1] and begin > 0.055 and end < 0.03
    assert metric_units.ends([2.0]) == (2.0, 2.0) and metric_units.ends([3.0, 2.0, 1.0]) == (
        3.0,
        1.0,
    )
    assert "Loss       2.000 → 1.000 bits/byte" in screen(
        run, plan(), loss_begin=2 * math.log(2), loss_end=math.log(2)
    )


def test_the_time_of_a_resumed_run_is_that_of_its_last_part(run: RunDir) -> None:
    text = screen(run, plan(), begun_at=300)
    assert "400 steps, 1.64 M tokens of stdlib, steps 301 to 400 in 1 min 15 s, 2 × cpu" in text
    assert "stdlib, step 400 in 1 min 15 s" in screen(run, plan(), begun_at=399)
    assert "tokens of stdlib, all of them before this start, 2 × cpu" in screen(
        run, plan(), begun_at=400
    )
    assert "tokens of stdlib in 1 min 15 s, 2 × cpu" in screen(run, plan(), begun_at=0)


def test_a_sample_cannot_control_the_terminal(run: RunDir) -> None:
    """A model of bytes produces any of them."""
    text = screen(run, plan(), sample="Hello\x1b[2J world\x1b]0;title\x07\x0e!")
    assert text.replace("\n", "").isprintable() and "│ Hello world !" in text


def test_a_long_sample_is_cut(run: RunDir) -> None:
    text = screen(run, plan(), sample="\n".join("x" * 300 for _ in range(40)))
    assert text.count("│") == 12
    assert max(map(len, text.splitlines())) < 140


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (3.21, "3.2 s"),
        (59.4, "59.4 s"),
        (75.2, "1 min 15 s"),
        (3600, "1 h 0 min"),
        (90061, "25 h 1 min"),
    ],
)
def test_durations(seconds: float, text: str, run: RunDir) -> None:
    assert f" in {text}, " in screen(run, plan(), seconds=seconds)


def test_twice_as_long() -> None:
    limits = {"num_iterations": 0, "num_epochs": 0}
    assert longer(limits | {"num_iterations": 400}, 400) == {"num_iterations": 800}
    assert longer(limits | {"num_epochs": 3}, 900) == {"num_epochs": 6}
    assert longer({"num_iterations": 400, "num_epochs": 3}, 400) == {
        "num_iterations": 800,
        "num_epochs": 6,
    }
    assert longer(limits, 123) == {"num_iterations": 246}


def next_line(text: str) -> str:
    """The resume command: the last line from the program's name to its end, as a person
    copies it."""
    found = re.search(
        r"(\./train\S*\.sh|\./launch\S*\.sh|python train\.py) .*$", text.rstrip().splitlines()[-1]
    )
    assert found, text
    return found.group()


@pytest.mark.parametrize("status", ["done", "stopped"])
@pytest.mark.parametrize(
    ("script", "ranks"), [(SIMPLE, 2), (ENHANCED, 2), (LAUNCH, 2), (LAUNCH, 1), (TRAIN, 1)]
)
def test_the_last_line_pasted_resumes_this_run(
    script: str, ranks: int, status: str, run: RunDir, shell: Shell
) -> None:
    found = shell.read(next_line(screen(run, plan(script, ranks), status=status, steps=200)))
    assert found.script == script
    assert found.ranks == ranks
    assert found.resume_from is not None
    assert found.resume_from.path == run.path
    assert found.config.num_iterations == (800 if status == "done" else 400)


def test_the_resume_command_under_torchrun(run: RunDir) -> None:
    assert (
        next_command(plan(TRAIN, 4), run)
        == "torchrun --nproc_per_node=4 train.py --resume='my run'"
    )


def test_a_run_in_another_folder_is_named_by_its_path(run: RunDir, tmp_path: Path) -> None:
    moved = RunDir(tmp_path / "big disk" / run.name)
    moved.create()
    by_path = plan(LAUNCH, 2, resume=str(moved.path))
    assert next_command(by_path, moved) == f"./launch_train.sh 2 --resume='{moved.path}'"
    assert f"--run='{moved.path}'" in screen(moved, by_path)
    for word in ("latest", run.name, str(run.path), "experiments/other"):
        named = plan(LAUNCH, 2, resume=word)
        assert next_command(named, run) == f"./launch_train.sh 2 --resume='{run.name}'"


def test_the_machines_are_kept(run: RunDir) -> None:
    made = plan(LAUNCH, 4, hosts="a,b")
    made["local_ranks"] = 2
    assert next_command(made, run) == "./launch_train.sh 2 --hosts=a,b --resume='my run'"
    made = plan(LAUNCH, 4, nnodes=2, node_rank=1, master_addr="a")
    made["local_ranks"], made["place"] = 2, {}
    by_hand = "--nnodes=2 --node_rank=1 --master_addr=a"
    assert next_command(made, run) == f"./launch_train.sh 2 {by_hand} --resume='my run'"
    made["place"] = {"leader": 1, "master_addr": "b"}  # this machine has taken over
    by_hand = "--nnodes=2 --node_rank=0 --master_addr=b"
    assert next_command(made, run) == f"./launch_train.sh 2 {by_hand} --resume='my run'"


def test_the_machine_that_has_taken_over_is_the_first_of_a_resume(run: RunDir) -> None:
    for given in ({"hosts": "a:2,b:2"}, {"hostfile": "machines"}):
        made = plan(LAUNCH, 4, **given)
        made["elastic"] = {
            "min_ranks": 1,
            "ranks": 4,
            "per_node": 2,
            "lost": [],
            "hosts": "b:2,a:2",
        }
        assert next_command(made, run) == ("./launch_train.sh 2 --hosts=b:2,a:2 --resume='my run'")


def test_the_resume_command_has_the_ranks_that_were_lost(run: RunDir) -> None:
    lost = {"min_ranks": 2, "ranks": 4, "device_batch_size": 8, "lost": [{"seat": 3}]}
    made = plan(LAUNCH, 3, device_batch_size=4)
    made["elastic"] = lost
    flags = "--resume='my run' --min_ranks=2 --device_batch_size=8"
    assert next_command(made, run) == f"./launch_train.sh 4 {flags}"
    assert next_command(made, run, device_batch_size=2).endswith(" --device_batch_size=2")
    made = plan(LAUNCH, 2, hosts="a,b", device_batch_size=8)
    made["elastic"] = lost | {"per_node": 2}
    made["local_ranks"] = 1
    flags = "--hosts=a,b --resume='my run' --min_ranks=2"
    assert next_command(made, run) == f"./launch_train.sh 2 {flags}"
    made["elastic"] = made["elastic"] | {"lost": []}
    assert next_command(made, run) == "./launch_train.sh 2 --hosts=a,b --resume='my run'"


def test_folders_that_the_user_named_are_kept(tmp_path: Path, home: Path, shell: Shell) -> None:
    run = RunDir(tmp_path / "it's elsewhere/r")
    run.create()
    made = plan(out_dir=str(tmp_path / "it's elsewhere"), log_dir="my logs")
    write_json(run.plan, made)
    found = shell.read(next_command(made, run, num_iterations=9))
    assert found.resume_from is not None
    assert found.resume_from.path == run.path
    assert (found.logs, found.config.num_iterations) == (home / "my logs", 9)
