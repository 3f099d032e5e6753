"""The main training with every entry script, and its files."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.e2e.conftest import Launched
from tests.e2e.hooks import at_rank, in_forward

Launch = Callable[..., Launched]
QUICKSTART = "configs/dual_gpu/quickstart.py"
FIRST_STEP = r"^\[[\d :-]+\] Epoch: 1, Iter: .*$"
LOG_LINE = re.compile(r"^\[(INFO|SUCCESS|WARNING|ERROR)\] \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S")


def test_the_simple_script_trains_two_ranks_with_complete_output(launch: Launch) -> None:
    run = launch(
        "./train_dual_gpu.sh",
        QUICKSTART,
        num_iterations=30,
        eval_every=10,
        tensorboard=True,
        matrix_lr=0.01,
    ).ok()
    assert sorted(run.steps) == list(range(1, 31))
    assert run.losses[0] == pytest.approx(math.log(320), abs=1e-3), (
        "an untrained model knows nothing"
    )
    assert run.losses[-1] < run.losses[0] - 1
    out = run.output
    for part in (
        "Distributed Training Setup",
        "gloo",
        "World size",
        "127.0.0.1:",
        "Sample",
        "bits/byte",
        "tokens/s",
        str(run.run.path),
    ):
        assert part in out
    assert re.search(
        r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] Epoch: 1, Iter: 10, Loss: \d+\.\d{4}", out, re.M
    )
    assert "./monitor_training.sh" in out and "--resume=" in out, "the next command to try"

    summary = run.summary
    assert summary["status"] == "done" and summary["steps"] == 30 and summary["tokens"] == 30 * 256
    assert summary["val_bpb_last"] < summary["val_bpb_first"]
    plan = json.loads(run.run.plan.read_text())
    assert (
        plan["ranks"] == 2
        and plan["device"]["value"] == "cpu"
        and plan["batch"]["accumulation"] == 1
    )
    events = [json.loads(line)["event"] for line in run.run.events.read_text().splitlines()]
    assert (
        events[0] == "start"
        and events[-1] == "end"
        and "checkpoint" in events
        and events.count("eval") == 3
    )
    assert list(run.run.tensorboard.glob("events.out.tfevents.*"))
    assert {p.name for p in run.run.ranks.iterdir()} >= {"rank0.log", "rank1.log"}
    assert run.run.rank_log(1).read_text() == "", "other ranks print only problems"

    (log,) = run.logs.glob("train_dual_gpu_*.log")
    assert re.fullmatch(r"train_dual_gpu_\d{8}_\d{6}\.log", log.name)
    assert LOG_LINE.match(log.read_text())
    rest = iter(log.read_text().splitlines())
    assert all(line in rest for line in out.splitlines()), "the log contains the console output"
    before = out.splitlines()[: out.splitlines().index(next(re.finditer(FIRST_STEP, out, re.M))[0])]
    assert len(before) <= 12, "\n".join(before)


@pytest.mark.soak
def test_the_enhanced_script_makes_the_same_plan_and_reports_resources(launch: Launch) -> None:
    simple = launch("./train_dual_gpu.sh", QUICKSTART, name="a").ok()
    enhanced = launch("./train_dual_gpu_enhanced.sh", f"--config={QUICKSTART}", name="b").ok()
    plans = [json.loads(r.run.plan.read_text()) for r in (simple, enhanced)]
    own = {
        "created",
        "launch",
        "command",
        "run_name",
        "run_dir",
        "log_file",
        "config",
        "memory",
        "retries",
        "text",
        "headline",
        "starter",
    }
    texts = [json.dumps({k: v for k, v in p.items() if k not in own}) for p in plans]
    same = [json.loads(re.sub(r"[\d.]+ GiB free", "… free", text)) for text in texts]
    assert same[0] == same[1]
    assert {k: v for k, v in plans[0]["config"].items() if k != "run_name"} == {
        k: v for k, v in plans[1]["config"].items() if k != "run_name"
    }
    assert "resource check" in enhanced.output and "host memory" in enhanced.output
    assert simple.losses == enhanced.losses


@pytest.mark.soak
def test_one_process_has_no_group_and_equals_two(launch: Launch) -> None:
    one = launch("./launch_train.sh", "1", QUICKSTART, precision="fp32").ok()
    two = launch("./launch_train.sh", "2", QUICKSTART, precision="fp32").ok()
    assert re.search(r"Backend +none", one.output)
    assert json.loads(one.run.plan.read_text())["batch"]["accumulation"] == 2
    assert one.losses[0] == pytest.approx(two.losses[0], rel=1e-6), "the same global batch"


# AdamW: Muon's bf16 arithmetic amplifies the different order of sums (test_engine.py compares
# it with its own tolerance).
EXACT = {"precision": "fp32", "optimizer": "adamw"}


@pytest.mark.soak
def test_ddp_flags_change_nothing(launch: Launch) -> None:
    plain = launch("./launch_train.sh", "2", QUICKSTART, **EXACT, device_batch_size=2).ok()
    static = launch(
        "./launch_train.sh", "2", QUICKSTART, **EXACT, device_batch_size=2, use_static_graph=True
    ).ok()
    assert json.loads(static.run.plan.read_text())["static_graph"]["value"] is False
    assert static.losses == plain.losses
    whole = launch(
        "./launch_train.sh", "2", QUICKSTART, **EXACT, use_static_graph=True, debug=True
    ).ok()
    assert (
        whole.losses == pytest.approx(plain.losses, rel=1e-4)
        and "TORCH_DISTRIBUTED_DEBUG=INFO" in whole.output
    )
    unused = launch(
        "./launch_train.sh",
        "2",
        QUICKSTART,
        **EXACT,
        device_batch_size=2,
        find_unused_parameters=True,
    ).ok()
    assert unused.losses == plain.losses


@pytest.mark.slow
def test_bare_python_and_bare_torchrun(launch: Launch, once: Launch) -> None:
    python = launch(sys.executable, "train.py", QUICKSTART).ok()
    assert re.search(r"Backend +none", python.output) and python.summary["status"] == "done"
    torchrun = launch(
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "train.py",
        f"--config={QUICKSTART}",
    ).ok()
    assert re.search(r"World size +2", torchrun.output) and torchrun.summary["status"] == "done"
    spawned = once("./launch_train.sh", "2", QUICKSTART)
    assert torchrun.losses == spawned.losses, "the training does not depend on the launcher"
    for run in (python, torchrun, spawned):
        log = Path(json.loads(run.run.plan.read_text())["log_file"]).read_text()
        lines = re.findall(r"^\[[\d :-]+\] Epoch: .*$", run.output, re.M)
        assert len(lines) >= 12 and re.findall(r"^\[[\d :-]+\] Epoch: .*$", log, re.M) == lines, (
            "the log equals the console, once"
        )


@pytest.mark.soak
def test_torchrun_as_launcher_trains(launch: Launch) -> None:
    run = launch("./launch_train.sh", "2", QUICKSTART, launcher="torchrun").ok()
    assert run.summary["steps"] == 12 and (run.run.ranks / "torchrun.log").exists()


@pytest.mark.slow
def test_torchrun_as_launcher_failure_is_named(launch: Launch) -> None:
    failed = launch(
        "./launch_train.sh",
        "2",
        QUICKSTART,
        launcher="torchrun",
        hook=in_forward(1, 5, "raise ValueError('planted')"),
    )
    assert failed.wait() == 4
    assert failed.failure["rank"] == 1 and "planted" in failed.failure["summary"]


@pytest.mark.soak
def test_a_slow_tracker_and_a_slow_sample_do_not_fail_a_finished_run(launch: Launch) -> None:
    """Both take longer than the hang limit."""
    slow = at_rank(
        0,
        """
        import time
        from training.trainer import tracking
        tracking.TensorBoard.close = lambda self, end: time.sleep(5)
        from training.tasks.gpt import model
        original = model.GPT.forward
        def forward(self, inputs, *args, **kwargs):
            if not args and not kwargs:
                time.sleep(0.5)
            return original(self, inputs, *args, **kwargs)
        model.GPT.forward = forward
""",
    )
    run = launch(
        "./launch_train.sh",
        "2",
        QUICKSTART,
        tensorboard=True,
        hang_timeout=3,
        sample_tokens=10,
        hook=slow,
    ).ok()
    assert run.summary["status"] == "done" and run.summary["sample"] is not None


@pytest.mark.slow
def test_nothing_listens_outside_loopback(launch: Launch) -> None:
    run = launch("./launch_train.sh", "2", QUICKSTART, num_iterations=100000)
    run.wait_for("Iter: 3,")
    descriptors = [
        p
        for pid in [run.process.pid, *run.pids.values()]
        for p in Path(f"/proc/{pid}/fd").iterdir()
    ]
    targets = [str(p.readlink()) for p in descriptors if p.is_symlink()]
    inodes = {t[len("socket:[") : -1] for t in targets if t.startswith("socket:")}
    rows = [
        line.split()
        for f in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(f).read_text().splitlines()[1:]
    ]
    listening = [row[1] for row in rows if row[9] in inodes and row[3] == "0A"]
    run.process.terminate()
    run.wait()
    assert listening, "the rendezvous"
    # 127.0.0.1, and the same as an IPv4 address in IPv6
    assert all(
        a.startswith(("0100007F:", "0000000000000000FFFF00000100007F:")) for a in listening
    ), listening


@pytest.mark.soak
@pytest.mark.skipif(
    re.search(r"[\s'\"]", str(ROOT)) is not None,
    reason="torch.compile on a CPU does not work in a folder with a space",
)
def test_compile_works_on_two_ranks(launch: Launch) -> None:
    """Compiled blocks inside DDP, with activation checkpointing around them and a chunked loss."""
    # see the next test
    flags = {
        "num_iterations": 4,
        "eval_every": 2,
        "depth": 2,
        "precision": "fp32",
        "device_batch_size": 2,
        "cwd": ROOT,
    }
    plain = launch("./launch_train.sh", "2", QUICKSTART, **flags).ok()
    compiled = launch(
        "./launch_train.sh",
        "2",
        QUICKSTART,
        env={"TORCH_COMPILE": "1"},
        activation_checkpointing=1,
        loss_chunks=2,
        **flags,
    )
    assert compiled.wait(240) == 0, compiled.output[-3000:]
    assert json.loads(compiled.run.plan.read_text())["compile"]["value"] is True
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-3)


@pytest.mark.slow
def test_unsupported_compile_is_rejected_before_the_start(launch: Launch) -> None:
    """The project's path has a space and a quote, which break torch's CPU code generator."""
    run = launch("./launch_train.sh", "2", QUICKSTART, env={"TORCH_COMPILE": "1"})
    assert run.wait() == 3
    assert "has a space or quote" in run.output and "--compile=0" in run.output
    assert not run.run.path.exists()


@pytest.mark.soak
def test_wandb_offline_disabled_and_no_login(launch: Launch) -> None:
    offline = launch(
        "./launch_train.sh", "1", QUICKSTART, use_dummy_wandb="false", wandb_mode="offline"
    ).ok()
    assert list(offline.run.path.glob("wandb/offline-run-*/*.wandb"))
    auto = launch(
        "./launch_train.sh",
        "1",
        QUICKSTART,
        use_dummy_wandb="false",
        env={"HOME": str(offline.logs)},
    ).ok()
    assert "disabled (no login" in auto.output and not (auto.run.path / "wandb").exists()


@pytest.mark.soak
def test_wandb_without_a_key_degrades_without_stopping_or_leaking(launch: Launch) -> None:
    env = {
        "HOME": "/nonexistent",
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_API_KEY": "k" * 40,
        "WANDB_INIT_TIMEOUT": "2",
    }
    run = launch(
        "./launch_train.sh", "1", QUICKSTART, use_dummy_wandb="false", wandb_mode="online", env=env
    ).ok()
    assert run.summary["status"] == "done"
    assert "W&B" in run.output and ("offline" in run.output or "is off" in run.output)
    for path in (p for p in run.run.path.parent.parent.rglob("*") if p.is_file()):
        assert b"k" * 40 not in path.read_bytes(), f"the key is in {path}"


@pytest.mark.soak
@pytest.mark.timeout(1000)  # one of two workers, on a CPU without bf16
def test_the_readme_quickstart(launch: Launch) -> None:
    run = launch("./train_dual_gpu.sh", QUICKSTART, tiny=False)
    assert run.wait(900) == 0, run.output[-3000:]
    summary = run.summary
    assert summary["val_bpb_last"] < 2.6 and len(summary["sample"]) > 100
    assert summary["steps"] == 300


def test_the_help_of_the_entrypoint_needs_no_torch() -> None:
    out = subprocess.run(
        [sys.executable, "train.py", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    ).stdout
    assert "--device_batch_size" in out and "Exit codes" in out
