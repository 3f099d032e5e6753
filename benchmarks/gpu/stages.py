"""The stages in their order, and how one is run: its record has figures and checks, or a reason."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.gpu import (
    compiling,
    correctness,
    overhead,
    pairs,
    peaks,
    recovery,
    speed,
    suites,
)
from benchmarks.gpu.bench import Bench, Failed, Skipped
from benchmarks.gpu.machine import Machine, cache_of, commit

LIMIT_S = 570.0  # machines are lent for commands of ten minutes
DONE, FAILED, SKIPPED = "done", "failed", "skipped"
Record = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """`run` returns figures with "checks", and may raise Skipped and Failed."""

    name: str
    title: str
    run: Callable[[Bench], Record]
    gpus: int = 1
    nanochat: bool = False  # measures it if its files are given


STAGES = {
    stage.name: stage
    for stage in (
        Stage("correctness", "The same training on CPU and GPU", correctness.run),
        *(
            Stage(
                f"mfu_{config}",
                f"Speed and memory, configs/dual_gpu/{config}.py",
                speed.stage(config),
                nanochat=True,
            )
            for config in speed.CONFIGS
        ),
        Stage("memory", "Peak memory of a step", peaks.run),
        Stage("compile", "Time to compile", compiling.run),
        Stage("overhead", "Host time of a step", overhead.run),
        Stage("oom", "Recovery from out of memory", recovery.run),
        Stage(
            "tests",
            "Tests that need a GPU",
            suites.stage("tests/gpu/test_memory.py tests/gpu/test_model.py", "plain and eager"),
        ),
        Stage("scaling", "One GPU and two", pairs.scaling, gpus=2),
        Stage("p2p", "Peer-to-peer copies", pairs.p2p, gpus=2),
        Stage(
            "faults",
            "Faults on two GPUs",
            suites.stage("tests/gpu/test_faults.py", "exception"),
            gpus=2,
        ),
    )
}


@dataclass(frozen=True)
class Session:
    """One call of the benchmark. `folder`: of the results, and of the stages' files."""

    machine: Machine
    folder: Path
    commit: str
    smoke: bool
    nanochat: Path | None
    limit_s: float = LIMIT_S  # of a stage

    @property
    def meant(self) -> bool:
        """Whether the checks count: a device that computes nothing, or tiny sizes, meet no goal."""
        return not (self.smoke or self.machine.null_gpu)

    def files(self, stage: Stage) -> Path:
        """The files of a stage that runs, or has failed."""
        return self.folder / "runs" / stage.name

    @cached_property
    def nanochat_commit(self) -> str:
        """Its version when this is first asked for."""
        return commit(self.nanochat, ("nanochat",)) if self.nanochat else ""

    def key(self, stage: Stage) -> Record:
        """What a stage's figures belong to; with another key it is measured again."""
        gpus = [gpu["name"] for gpu in self.machine.gpus]
        own = {"nanochat": self.nanochat_commit} if stage.nanochat and self.nanochat else {}
        return own | {
            "commit": self.commit,
            "torch": self.machine.torch,
            "gpus": gpus,
            "no_compiler": self.machine.no_compiler,
            "null_gpu": self.machine.null_gpu,
            "smoke": self.smoke,
        }

    def measure(self, stage: Stage) -> Record:
        """Run a stage. Its files are kept only if it fails."""
        work, begun = self.files(stage), time.monotonic()
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        cache = cache_of(self.folder)
        bench = Bench(self.machine, work, cache, self.smoke, self.nanochat, self.limit_s)
        record: Record = {"title": stage.title, "key": self.key(stage), "time": time.time()}
        record["in_use"] = list(self.machine.in_use)
        record |= {"status": DONE, "reason": "", "figures": {}, "checks": []}
        try:
            if len(self.machine.gpus) < stage.gpus:
                raise Skipped(f"needs {stage.gpus} GPUs, this machine has {len(self.machine.gpus)}")
            figures = stage.run(bench)
            record |= {"checks": figures.pop("checks"), "figures": figures}
        except Skipped as reason:
            record |= {"status": SKIPPED, "reason": str(reason)}
        except Failed as reason:
            checks = reason.found.pop("checks", [])
            record |= {"status": FAILED, "reason": str(reason)}
            record |= {"checks": checks, "figures": reason.found}
        except Exception as error:  # a figure that is missing must not cost the other stages
            record |= {"status": FAILED, "reason": f"{type(error).__name__}: {error}"}
        record["seconds"] = round(time.monotonic() - begun, 1)
        if record["status"] != FAILED:
            shutil.rmtree(work, ignore_errors=True)
        return record


def bad_checks(record: Record) -> list[Record]:
    return [check for check in record["checks"] if not check["ok"]]
