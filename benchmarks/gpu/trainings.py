"""Trainings of a stage: ranks of train.py started directly, as a platform would, or a script.

NCCL refuses two ranks on one device of one host. With a different NCCL_HOSTID each they count as
two hosts and exchange gradients through sockets: right results, times that mean nothing.
"""

from __future__ import annotations

import shutil
import socket
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchmarks.gpu.bench import Bench, Failed, Program
from benchmarks.gpu.machine import ROOT, Machine
from training.core import project
from training.core.errors import Exit
from training.core.rundir import RunDir, read_json, read_records
from training.host.gpus import VISIBLE

WARM_UP = 10  # steps that are not counted
TINY = {"depth": 1, "max_seq_len": 32, "device_batch_size": 4, "compile": 0}
QUIET = {
    "eval_every": 0,
    "save_every": 0,
    "keep_checkpoints": 1,
    "sample_tokens": 0,
    "tensorboard": "false",
    "report": "false",
    "use_dummy_wandb": "true",
}


@dataclass(frozen=True)
class Run:
    """A training that has ended. `started`: unix s."""

    folder: RunDir
    code: int
    started: float
    output: str

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """Records of the steps; of a step that was repeated after a restart, the last one."""
        by_step = {r["step"]: r for r in read_records(self.folder.metrics) if "loss" in r}
        return [record for _, record in sorted(by_step.items())]

    @property
    def losses(self) -> list[float]:
        return [float(record["loss"]) for record in self.steps]

    @cached_property
    def plan(self) -> dict[str, Any]:
        return read_json(self.folder.plan) or {}

    @property
    def events(self) -> list[dict[str, Any]]:
        return list(read_records(self.folder.events))

    @property
    def first_step_s(self) -> float:
        """From the start of the command to the end of step 1."""
        return float(self.steps[0]["time"]) - self.started

    def step_ms(self, warm_up: int = WARM_UP) -> float:
        """Mean over the steps after the warm-up."""
        return statistics.fmean(r["step_ms"] for r in self.steps[warm_up:])

    @property
    def peak_bytes(self) -> int:
        """Highest peak of torch's allocator on any rank."""
        return max(max(used or 0 for used in r["memory_bytes"]) for r in self.steps)

    def ok(self) -> Run:
        """Raises Failed if it has not ended well."""
        if self.code:
            raise Failed(f"{self.folder.name}: exit status {self.code}\n{self.output[-1500:]}")
        return self

    @property
    def error(self) -> str:
        """The first line of an error in its output."""
        lines = self.output.splitlines()
        return next((one for one in lines if "[ERROR]" in one), "").partition("[ERROR] ")[2]

    def remove(self) -> None:
        """Its files: checkpoints are large."""
        shutil.rmtree(self.folder.path, ignore_errors=True)


def shape(bench: Bench, real: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a model, tiny in a smoke run."""
    return {**real, **TINY} if bench.smoke else dict(real)


def train(
    bench: Bench,
    name: str,
    *config: str,
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
    **flags: object,
) -> Run:
    """train.py on `ranks` ranks; `config`: at most one file. If one fails, all are killed."""
    console, folder = bench.folder / f"{name}.rank0.txt", RunDir(bench.folder / name)
    argv = [bench.machine.executable, "-u", str(ROOT / "train.py"), *config]
    argv += arguments(bench, name, flags)
    port = _free_port()
    programs = [
        Program(
            argv,
            console.with_name(f"{name}.rank{rank}.txt"),
            {**_rank(rank, ranks, port, bench.machine), **(env or {})},
        )
        for rank in range(ranks)
    ]
    started = time.time()
    statuses = bench.run(programs)
    code = next((s for s in statuses if s), 0)
    texts = [p.end_of_output() for p, status in zip(programs, statuses, strict=True) if status]
    return Run(folder, code, started, "\n".join(texts))


def launch(
    bench: Bench,
    name: str,
    *config: str,
    ranks: int,
    env: Mapping[str, str] | None = None,
    **flags: object,
) -> Run:
    """./launch_train.sh, with its supervisor and, at the first start of several GPUs, its test of
    the communication."""
    console, started = bench.folder / f"{name}.txt", time.time()
    argv = [*project.script("launch_train.sh"), str(ranks), *config]
    argv += arguments(bench, name, flags)
    program = Program(argv, console, {"DUET_PYTHON": bench.machine.executable, **(env or {})})
    (code,) = bench.run([program])
    return Run(RunDir(bench.folder / name), code, started, program.end_of_output())


def does_not_fit(run: Run) -> bool:
    """Whether the plan has refused the run for lack of memory, or of another resource."""
    return run.code == Exit.RESOURCES


def arguments(bench: Bench, name: str, flags: Mapping[str, object]) -> list[str]:
    """Flags of train.py for a run called `name` in the stage's folder."""
    own: dict[str, object] = {"out_dir": bench.folder, "log_dir": bench.folder / "logs"}
    if "resume" not in flags:
        own["run_name"] = name
    if bench.smoke:
        own["data"] = _small_text(bench)
    values = {"device": "cuda", "data": "stdlib", **QUIET, **own, **flags}
    return [f"--{key}={value}" for key, value in values.items()]


def _small_text(bench: Bench) -> str:
    path = bench.folder / "text.txt"
    path.write_text("".join(f"line {i} of the text\n" for i in range(4000)))
    return str(path)


def _rank(rank: int, ranks: int, port: int, machine: Machine) -> dict[str, str]:
    """Variables of a rank; those that share a GPU see only that one."""
    if ranks == 1:
        return first_gpu(machine)
    env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    env |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return env | (
        {**first_gpu(machine), "NCCL_HOSTID": f"rank{rank}"} if len(machine.gpus) < ranks else {}
    )


def first_gpu(machine: Machine) -> dict[str, str]:
    """Only the GPU of stages with one rank is visible."""
    return {VISIBLE: machine.first}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
