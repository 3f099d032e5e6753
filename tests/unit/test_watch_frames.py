"""Frames of a stack: the user's own line, and what a thread waits for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import each
from training.watchdog.probes import stacks, waits
from training.watchdog.probes.stacks import Frame, Thread

ENV = "/u/.venv/lib/python3.11/site-packages"


def thread(*frames: tuple[str, str]) -> Thread:
    return Thread(
        "MainThread",
        True,
        False,
        False,
        tuple(Frame(file, 1, function) for file, function in frames),
    )


@pytest.mark.parametrize(
    "file",
    [
        f"{ENV}/torch/nn/modules/module.py",
        "/usr/lib/python3/dist-packages/numpy/core.py",
        "/usr/lib/python3.12/threading.py",
        "<frozen importlib._bootstrap>",
        "<string>",
        "/home/me/pytorch/torch/nn/modules/linear.py",
        "/home/me/pytorch/torch/functional.py",
        str(Path(stacks.__file__).parents[2] / "inspector/distributed.py"),
        str(Path(stacks.__file__).parents[3] / "lib/run_script.py"),
    ],
)
def test_the_users_own_line(file: str) -> None:
    mine = Frame("/home/me/torch experiments/train.py", 7, "step")
    assert stacks.own([Frame(file, 1, "f"), mine, Frame("/home/me/main.py", 9, "<module>")]) == mine
    assert stacks.own([Frame(file, 1, "f")]) == Frame(file, 1, "f")
    assert stacks.own([]) is None


C10D, DDP = (
    f"{ENV}/torch/distributed/distributed_c10d.py",
    f"{ENV}/torch/nn/parallel/distributed.py",
)
WRAPPER = (f"{ENV}/torch/distributed/c10d_logger.py", "_exception_logger.<locals>.wrapper")
MINE = ("/home/me/train.py", "main")


@each(
    ("frames", "name"),
    [
        # As read from real ranks with torch 2.13; from faulthandler the functions have no class.
        ([(C10D, "all_reduce"), WRAPPER, MINE], "all_reduce"),
        (
            [(C10D, "all_gather"), WRAPPER, (C10D, "all_gather_object"), WRAPPER, MINE],
            "all_gather_object",
        ),
        (
            [
                (f"{ENV}/torch/distributed/rendezvous.py", "_create_c10d_store"),
                (C10D, "init_process_group"),
                WRAPPER,
                MINE,
            ],
            "init_process_group",
        ),
        (
            [
                (f"{ENV}/torch/distributed/utils.py", "_verify_param_shape_across_processes"),
                (DDP, "DistributedDataParallel.__init__"),
                MINE,
            ],
            "DistributedDataParallel.__init__",
        ),
        ([(DDP, "_pre_forward"), (DDP, "forward"), MINE], "DistributedDataParallel.forward"),
        (
            [
                (f"{ENV}/torch/autograd/graph.py", "_engine_run_backward"),
                (f"{ENV}/torch/_tensor.py", "Tensor.backward"),
                MINE,
            ],
            "backward",
        ),
        (
            [(str(Path(stacks.__file__).parents[2] / "inspector/distributed.py"), "barrier"), MINE],
            "barrier",
        ),
        # Not waiting for other ranks: the model's own forward below DDP's, a hook below backward, a
        # checkpoint file.
        ([MINE, (DDP, "DistributedDataParallel.forward"), MINE], None),
        ([(DDP, "DistributedDataParallel._run_ddp_forward"), MINE], None),
        (
            [
                ("/home/me/hooks.py", "hook"),
                (f"{ENV}/torch/autograd/graph.py", "_engine_run_backward"),
                MINE,
            ],
            None,
        ),
        ([(f"{ENV}/torch/distributed/checkpoint/filesystem.py", "write"), MINE], None),
        ([MINE], None),
        ([], None),
    ],
)
def test_frames_that_wait_for_other_ranks(frames: list[tuple[str, str]], name: str | None) -> None:
    assert waits.in_collective(thread(*frames)) == name


def test_waiting_for_a_worker() -> None:
    loader = f"{ENV}/torch/utils/data/dataloader.py"
    poll = ("/usr/lib/python3.11/multiprocessing/connection.py", "wait")
    assert waits.waits_for_worker(
        thread(poll, (loader, "_MultiProcessingDataLoaderIter._try_get_data"), MINE)
    )
    assert waits.waits_for_worker(thread(poll, (loader, "_shutdown_workers"), MINE))
    assert not waits.waits_for_worker(
        thread(MINE, (loader, "_SingleProcessDataLoaderIter._next_data"), MINE)
    )
    assert not waits.waits_for_worker(thread(MINE))


@pytest.mark.parametrize(
    ("file", "code", "so"),
    [
        ("/u/lib/python3.11/site-packages/torch/serialization.py", "x", True),
        ("/u/lib/python3.11/site-packages/torch/distributed/checkpoint/filesystem.py", "x", True),
        ("/u/lib/python3.11/site-packages/safetensors/torch.py", "x", True),
        ("/u/lib/python3.11/shutil.py", "x", True),
        ("train.py", "    os.fsync(handle)", True),
        ("train.py", "    log.flush()", True),
        ("train.py", "    file.write(block)", True),
        ("train.py", "    lock.acquire()", False),
        ("train.py", "    dist.all_reduce(closed)", False),
    ],
)
def test_frames_that_write_a_file(tmp_path: Path, file: str, code: str, so: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(code + "\n")
    outer = Frame("/home/me/train.py", 3, "main")
    assert waits.saves([Frame(str(script) if file == "train.py" else file, 1, "f"), outer]) is so
    assert not waits.saves([outer]) and not waits.saves([])


@each(
    ("code", "so"),
    [
        ("total += loss.item()", True),
        ("batch = batch.to(device)", True),
        ("x, y = x.cuda(), y.cuda()", True),
        ("if torch.isnan(tr_loss_step) or torch.isinf(tr_loss_step):", True),
        ("if loss.isinf():", True),
        ("lock.acquire()", False),
        ("y = self.total(x)", False),
        ("torch.cuda.empty_cache()", False),
    ],
)
def test_frames_that_wait_for_a_gpu(tmp_path: Path, code: str, so: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{code}\n")
    assert waits.waits_for_device(Frame(str(script), 1, "step")) is so


def test_a_wait_for_a_gpu_in_torch() -> None:
    assert waits.waits_for_device(
        Frame("/u/site-packages/torch/cuda/__init__.py", 900, "synchronize")
    )
