"""Memory of a step of any task by fake tensors: what is counted, and `device_batch_size=auto`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch.nn import functional

from tests.unit.measured_task import CPU_ARGS, WEIGHTS, in_process, plan, question, sized
from tests.unit.own_task import SIZED
from training.core.errors import Exit, UserError
from training.core.messages import msg
from training.core.units import GIB
from training.host.gpus import Gpu, GpuInventory
from training.host.torch_build import TorchBuild
from training.plan import training_plan as planner
from training.tasks import cuda_autocast, fake_step
from training.tasks.memory import CONTEXT, gib
from training.tasks.sample_memory import SampleLoad, SampleStep

__all__ = ["in_process", "sized"]  # fixtures


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """gpus(4.0): two GPUs with 4.0 GiB free on each."""

    def with_free(free: float) -> None:
        cards = tuple(
            Gpu(n, f"GPU-{n}", f"Card {n}", 32 * GIB, int(free * GIB), 0, 40, 70.0, (12, 0))
            for n in range(2)
        )
        monkeypatch.setattr(
            planner.gpus,
            "inventory",
            lambda environ, **_: GpuInventory(cards, "all of them", "580", "13.0"),
        )
        monkeypatch.setattr(planner.torch_build, "installed", lambda: TorchBuild("2.99.0", "13.0"))
        monkeypatch.setattr(planner.env_vars, "cpu_count", lambda: 8)
        monkeypatch.setattr(planner.toolchain, "missing", lambda *_: {})

    return with_free


# ── counted memory
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_byte_of_a_small_model_is_counted(sized: str) -> None:
    load = SampleLoad(**fake_step.answer(question(sized, [100]))["load"])
    assert (load.parameters, load.gradients) == (4 * WEIGHTS, 4 * WEIGHTS)
    assert load.optimizer == 8 * WEIGHTS + 4 * 4, (
        "two moments, and the step count of each of four tensors"
    )
    stored = load.parameters + load.optimizer
    assert stored <= load.pinned < 2 * stored and SampleStep(load).saving == load.pinned
    # One sample: its 64 numbers and target, two layers of 256 forward; slightly more where both
    # directions meet in the backward pass.
    batch, kept = 4 * (64 + 1), 4 * (256 + 256)
    plain = fake_step.answer(replace(question(sized, [100]), cuda=False))["load"]["per_sample"]
    assert batch + kept <= plain <= batch + kept + 4 * (256 + 64)
    assert load.per_sample - plain == batch, "the next batch is on a GPU already"
    half = SampleLoad(**fake_step.answer(question(sized, [50]))["load"])
    assert SampleStep(load).resized(50).estimate.total == pytest.approx(
        SampleStep(half).estimate.total, rel=0.01
    )


def test_gradients_of_one_rank_begin_in_the_backward_pass(sized: str) -> None:
    """With DDP's buckets, or after the first of several micro-batches, a forward pass has them."""

    def total(size: int, ranks: int, samples: int = 0) -> int:
        asked = replace(question(sized, [size], total=samples), ranks=ranks)
        return SampleStep(SampleLoad(**fake_step.answer(asked)["load"])).estimate.total

    size, gradients = 400, 4 * WEIGHTS
    held, alone = total(size, 2), total(size, 1)
    assert 0.9 * gradients <= held - alone <= gradients and held - alone > 0.03 * (alone - CONTEXT)
    assert total(size, 1, 2 * size) == held, "of the micro-batch before"
    update = total(1, 2)
    assert update == pytest.approx(total(1, 1), abs=8), "the update is the peak, and has them"
    load = SampleLoad(4, 100, 90, 200, 10, 25, bf16=True, cuda=False, ranks=1, total=4, late=80)
    step, smaller = SampleStep(load), SampleStep(load).resized(2)
    assert (step.estimate.activations, smaller.estimate.activations) == (30, 60), "it accumulates"
    assert SampleStep(replace(load, total=0)).resized(2).estimate.activations == 20


@pytest.mark.parametrize(
    ("cuda", "fp16", "least", "most"),
    # AdamW's temporary memory: of one weight after the other, and of all together. A fused kernel
    # has none: autocast's copies are more.
    [(False, False, 0.05, 0.3), (True, False, 1.0, 1.1), (True, True, 0.5, 0.6)],
)
def test_the_optimizer_s_temporary_memory_is_that_of_the_device(
    write: Callable[..., str], cuda: bool, fp16: bool, least: float, most: float
) -> None:
    layers = "nn.Linear(64, width), nn.ReLU(), *(nn.Linear(width, width) for _ in range(16)), nn"
    path = write("deep.py", SIZED.replace("nn.Linear(64, width), nn.ReLU(), nn", layers))
    asked = replace(question(path, [1], width=64), cuda=cuda, bf16=fp16, fp16=fp16)
    load = SampleLoad(**fake_step.answer(asked)["load"])  # type: ignore[arg-type]
    assert least <= (load.fixed + load.per_sample) / load.gradients < most


def test_norms_are_fp32_in_the_autocast_of_a_gpu(write: Callable[..., str]) -> None:
    """Input and output of a norm have 4 bytes each there, and its output 2 on the CPU."""
    norms = "nn.ReLU(), nn.Linear(width, width), nn.GroupNorm(1, width), nn.SiLU(), nn.Linear"
    path = write("norms.py", SIZED.replace("nn.ReLU(), nn.Linear", norms))
    asked = replace(question(path, [512], width=64), bf16=True)
    host, gpu = (
        fake_step.answer(replace(asked, cuda=cuda))["load"]["per_sample"] for cuda in (False, True)
    )
    assert gpu - host >= 64 * (4 + 4 - 2) + 65 * 4, "with the next batch"


def test_the_functions_of_a_gpu_s_autocast_are_torch_s() -> None:
    header = Path(torch.__file__).with_name("include") / "ATen/autocast_mode.h"
    text = header.read_text()
    text = text[text.index("define AT_FORALL_FP32(") : text.index("define AT_FORALL_PROMOTE")]
    found = set(re.findall(r"_\((\w+)", text)) - {"ADD_NS", "_"}
    assert len(found) > 40 and found <= cuda_autocast.FP32 | cuda_autocast.RESULT


@pytest.mark.parametrize("name", ["layer_norm", "softmax", "pow", "sum", "mse_loss"])
def test_a_gpu_s_autocast_returns_fp32(name: str) -> None:
    call: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "layer_norm": lambda x: functional.layer_norm(x, (4,)),
        "softmax": lambda x: x.softmax(-1),
        "pow": lambda x: x**2,
        "sum": lambda x: x.sum(),
        "mse_loss": lambda x: functional.mse_loss(x, x),
    }
    half = torch.ones(4, dtype=torch.bfloat16)
    with cuda_autocast.CudaAutocast():
        with torch.autocast("cpu", torch.bfloat16):
            assert call[name](half).dtype == torch.float32
            assert functional.silu(half).dtype == torch.bfloat16
        assert call[name](half).dtype == torch.bfloat16


def test_a_frozen_layer_is_measured(write: Callable[..., str]) -> None:
    frozen = SIZED.replace(
        "nn.Linear(64, width), nn", "nn.Linear(64, width).requires_grad_(False), nn"
    )
    load = SampleLoad(**fake_step.answer(question(write("frozen.py", frozen), [4]))["load"])
    assert (load.parameters, load.gradients) == (4 * WEIGHTS, 4 * (256 + 1))
    assert load.optimizer == 8 * (256 + 1) + 2 * 4


def test_modules_outside_of_the_model_may_be_frozen_and_called_twice(
    write: Callable[..., str], sized: str
) -> None:
    """A teacher in front of the loss, whose weights have no gradients but are in memory."""
    size = 1000
    made = "return Net("
    teacher = f"self.teacher = nn.Linear(64, {size}).requires_grad_(False).eval()\n        {made}"
    squared = """((model(batch["x"])["found"] - batch["y"]) ** 2).mean()"""
    twice = f"{squared} + self.teacher(batch['x']).mean() - self.teacher(batch['x']).mean()"
    path = write("teacher.py", SIZED.replace(made, teacher).replace(squared, twice))
    plain, load = (
        SampleLoad(**fake_step.answer(question(one, [4]))["load"]) for one in (sized, path)
    )
    assert (load.parameters, load.gradients) == (plain.parameters, plain.gradients)
    weights = 4 * 65 * size
    assert weights <= load.fixed - plain.fixed < 1.02 * weights


def test_the_average_of_the_weights_is_counted(sized: str) -> None:
    asked = question(sized, [4])
    plain = SampleLoad(**fake_step.answer(asked)["load"])  # type: ignore[arg-type]
    asked.config["ema"] = 0.999
    load = SampleLoad(**fake_step.answer(asked)["load"])  # type: ignore[arg-type]
    assert (plain.average, load.average) == (0, 4 * WEIGHTS)
    more = SampleStep(load).estimate.total - SampleStep(plain).estimate.total
    assert more == 4 * WEIGHTS and load.pinned > plain.pinned


def test_the_copies_of_compressed_gradients_are_counted(sized: str) -> None:
    asked, found = question(sized, [4]), {}
    for wish in ("none", "bf16", "auto"):
        asked.config["gradient_compression"] = wish
        load = SampleLoad(**fake_step.answer(asked)["load"])  # type: ignore[arg-type]
        found[wish] = SampleStep(load).estimate.total
    assert found["bf16"] - found["none"] == found["auto"] - found["none"] == 4 * WEIGHTS


def test_the_cuda_context_of_a_gpu_is_named() -> None:
    for cuda in (True, False):
        found = SampleStep(SampleLoad(4, 9, 9, 9, 9, 9, bf16=True, cuda=cuda, ranks=1)).estimate
        text = msg("tasks.sample.memory.context", context=gib(CONTEXT))
        assert (text in found.sentence()) is cuda


def test_no_memory_is_allocated_and_nothing_is_computed(sized: str) -> None:
    """Ten billion weights: 40 GB, and three times as much again."""
    before = psutil.Process().memory_info().rss
    load = SampleLoad(**fake_step.answer(question(sized, [1 << 20], width=10**10 // 65))["load"])
    assert load.parameters > 39 * 10**9 and SampleStep(load).estimate.total > 160 * 10**9
    assert psutil.Process().memory_info().rss - before < GIB


def test_the_estimate_includes_the_needs_of_several_ranks() -> None:
    load = SampleLoad(
        4, 100, 90, 200, fixed=10, per_sample=5, bf16=True, cuda=True, ranks=2, total=8
    )
    estimate = SampleStep(load).estimate
    assert (estimate.activations, estimate.gradients, estimate.context, estimate.saved) == (
        30,
        90,
        CONTEXT,
        0,
    )
    assert estimate.total == 100 + 90 + 200 + 30 + CONTEXT
    assert (estimate.needed, estimate.tight) == (
        int(estimate.total * 1.1) + GIB,
        int(estimate.total * 1.25) + GIB,
    )
    gathering = SampleStep(replace(load, total=16)).estimate
    assert gathering.gradients == 180, "DDP's buckets and the accumulated gradients"
    assert SampleStep(replace(load, total=16, ranks=1)).estimate.gradients == 90
    compressed = [replace(load, compressed=True, ranks=ranks) for ranks in (1, 2, 3)]
    assert [SampleStep(one).estimate.gradients for one in compressed] == [90, 90 + 90, 90 + 45]
    cpu = SampleStep(replace(load, cuda=False)).estimate
    assert (cpu.context, cpu.saved) == (0, 300), "rank 0's checkpoint copy is in the same memory"
    shared = SampleStep(replace(load, cuda=True, pinned=512, shared=True)).estimate
    assert (shared.context, shared.saved) == (CONTEXT, 512), "of a GPU with the host's memory too"


def test_a_constructor_that_needs_values_runs_with_real_tensors(sized: str) -> None:
    tricky = fake_step.answer(question(sized, [100], trick="item"))["load"]
    assert tricky == fake_step.answer(question(sized, [100]))["load"]


# ── choice of the micro-batch
# ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_largest_that_fits_is_chosen(sized: str) -> None:
    width = 1 << 20  # 8 MB per sample
    sizes = [1, 8, 48, 240]
    each = {
        size: SampleStep(
            SampleLoad(**fake_step.answer(question(sized, [size], width=width))["load"])
        ).estimate.needed
        for size in sizes
    }
    assert sorted(each.values()) == list(each.values())
    for best, more in itertools.pairwise(sizes):
        for room in (each[best], each[more] - 1):
            found = fake_step.answer(question(sized, sizes, room=room, width=width))
            assert (found["load"]["sequences"], found["fits"], found["of"]) == (
                best,
                True,
                len(sizes),
            )
    found = fake_step.answer(question(sized, sizes, room=each[1] - 1, width=width))
    assert (found["load"]["sequences"], found["fits"]) == (1, False)


@pytest.mark.parametrize(
    ("samples", "of", "size"), [(6400, 7, 64), (6399, 6, 32), (50, 1, 1), (10**9, 17, 1 << 16)]
)
def test_without_a_total_an_epoch_keeps_its_steps(
    samples: int, of: int, size: int, sized: str
) -> None:
    found = fake_step.answer(question(sized, None, samples=samples))
    assert (found["load"]["sequences"], found["of"]) == (size, of)


@pytest.mark.usefixtures("in_process")
def test_auto_is_decided_by_free_gpu_memory(sized: str, gpus: Callable[[float], None]) -> None:
    wide = (
        "2",
        "--task=sized.py",
        "--width=1000000",
        "--device_batch_size=auto",
        "--total_batch_size=20000",
        "--precision=fp32",
        "--compile=0",
    )
    chosen = {}
    for free in (8.0, 16.0):
        gpus(free)
        made = plan(*wide)
        chosen[free] = made["batch"]["device_sequences"]
        size, total = chosen[free], made["memory"]["needed_bytes"]
        assert (
            made["config"]["device_batch_size"] == made["device_batch_size"]["value"] == size
            and 10000 % size == 0
        )
        assert made["batch"]["accumulation"] == 10000 // size and total <= free * GIB
        more = min(n for n in range(size + 1, 10001) if 10000 % n == 0)
        assert (
            SampleStep(SampleLoad(**made["memory"]["load"])).resized(more).estimate.needed
            > free * GIB
        ), "no larger one fits"
        largest = msg("tasks.gpt.fit.largest", sizes=25)
        assert f"device_batch_size {size}: {largest}" in made["text"]
        assert any(
            text.startswith(
                f"memory, by fake tensors: {gib(made['memory']['total_bytes'])} per rank ("
            )
            for text in made["text"]
        )
    assert chosen[8.0] < chosen[16.0]


def test_a_total_that_is_not_divisible_is_refused(sized: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(*CPU_ARGS, "--device_batch_size=auto", "--total_batch_size=7")
    assert (
        caught.value.code == Exit.CONFIG and "total_batch_size 7" in caught.value.problems[0].what
    )
    assert any("--total_batch_size=8" in fix for fix in caught.value.problems[0].fixes)


@pytest.mark.usefixtures("in_process")
def test_a_step_that_does_not_fit_is_refused_and_a_smaller_one_suggested(
    sized: str, gpus: Callable[[float], None]
) -> None:
    gpus(8.0)
    args = (
        "2",
        "--task=sized.py",
        "--width=1000000",
        "--device_batch_size=2000",
        "--precision=fp32",
        "--compile=0",
    )
    with pytest.raises(UserError) as caught:
        plan(*args)
    assert caught.value.code == Exit.RESOURCES
    fixes = [fix for problem in caught.value.problems for fix in problem.fixes]
    size = next(
        int(fix.rpartition("--device_batch_size=")[2].split()[0])
        for fix in fixes
        if "--device_batch_size=" in fix
    )
    assert 1 <= size < 2000
    assert (
        plan(*args[:3], f"--device_batch_size={size}", *args[4:])["batch"]["device_sequences"]
        == size
    ), "the suggested fix is accepted"
