"""Runs trainings for each number of ranks in interleaved rounds and reads their step times."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from training.cli.scaling.experiment import THREADS, WARM_UP_STEPS, Experiment
from training.core.errors import Exit
from training.core.messages import msg
from training.core.run_reader import read_failure
from training.core.rundir import RunDir, read_json, read_records
from training.core.units import plural
from training.host import process

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PREFIX = "duet-scaling-"
POLL_S = 0.05
STOP_S = 2.0  # short: a measurement saves nothing
SHOWN_LINES = 30
LEAST_OVERLAP = 0.5  # share of the steps


@dataclass(frozen=True)
class RankLayout:
    """One kind of measurement: `ranks` in one run, or `apart`, in as many simultaneous runs of one
    rank."""

    ranks: int
    apart: bool = False

    def __str__(self) -> str:
        return (
            msg("cli.scaling.runs_apart", ranks=self.ranks)
            if self.apart
            else plural(self.ranks, "rank")
        )


@dataclass(frozen=True)
class StepTime:
    end_s: float  # wall time
    ms: float


@dataclass
class Sizes:
    """Sizes of the model, as far as the runs report them."""

    parameters: int | None = None
    gradient_bytes: dict[int, int] = field(default_factory=dict)  # of a rank and step, by ranks


Round = dict[RankLayout, float | None]  # step time in ms; None: not measured


class Failed(Exception):
    """A failed run, with a text for people. `code`: exit code of the measurement."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class BackgroundLoad:
    """CPU use of other processes since creation, on the cores available to this one; it makes the
    figures too low."""

    def __init__(self) -> None:
        self._begin_s, self._before_s = time.monotonic(), self._others_s()

    def cores(self) -> float:
        """Average number of cores in use by others."""
        return max(
            0.0, (self._others_s() - self._before_s) / max(1e-6, time.monotonic() - self._begin_s)
        )

    @staticmethod
    def _others_s() -> float:
        """CPU seconds on these cores, including steal time, without this process and its finished
        children."""
        import psutil

        every = psutil.cpu_times(percpu=True)
        usable = [every[n] for n in os.sched_getaffinity(0) if n < len(every)]
        busy = sum(c.user + c.nice + c.system + c.irq + c.softirq + c.steal for c in usable)
        return float(busy - sum(os.times()[:4]))


def all_rounds(experiment: Experiment) -> tuple[list[Round], Sizes]:
    """Step times of every round, and the sizes of the model. Raises Failed and keeps the
    run directory then. Never leaves a process of a run."""
    kinds = [
        RankLayout(1),
        *(RankLayout(n, apart) for n in experiment.ranks if n > 1 for apart in (False, True)),
    ]
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    laboratory = _Laboratory(experiment, folder)
    rounds: list[Round] = []
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no tqdm thread, since this process forks
    try:
        with tqdm(
            total=experiment.rounds * len(kinds),
            disable=None,
            unit="run",
            leave=False,
            dynamic_ncols=True,
        ) as bar:
            for number in range(experiment.rounds):
                one: Round = {}
                # Alternating order, so that a machine that warms up favours no kind.
                for kind in kinds if number % 2 == 0 else kinds[::-1]:
                    bar.set_description(
                        msg(
                            "cli.scaling.round",
                            number=number + 1,
                            rounds=experiment.rounds,
                            kind=kind,
                        )
                    )
                    one[kind] = laboratory.measure(kind)
                    bar.update()
                rounds.append(one)
    except BaseException as error:
        if not isinstance(error, Failed):
            _remove(folder)
        raise
    _remove(folder)
    return rounds, laboratory.sizes


class _Laboratory:
    def __init__(self, experiment: Experiment, folder: Path) -> None:
        self.experiment, self.folder = experiment, folder
        self.sizes = Sizes()
        self._step_ms = math.inf  # of one rank alone
        self._late_s = 0.0  # longest time that the first of several runs trained alone
        self._count = 0

    def measure(self, kind: RankLayout) -> float | None:
        """Median step time in ms; for runs apart that of the slowest, since ranks wait for each
        other."""
        experiment, commands = self.experiment, []
        # Runs that start at different times need more steps to overlap long enough.
        extra = math.ceil(1000 * self._late_s / self._step_ms) if kind.apart and self._late_s else 0
        for place in range(kind.ranks if kind.apart else 1):
            self._count += 1
            command = experiment.command(
                1 if kind.apart else kind.ranks, self.folder, f"run{self._count}", extra
            )
            commands.append(
                (
                    command,
                    self._environment(place if kind.apart else None),
                    RunDir(self.folder / f"run{self._count}"),
                )
            )
        self._run(commands)
        runs = [steps(run) for _, _, run in commands]
        summary = read_json(commands[0][2].summary) or {}
        self.sizes.parameters = summary.get("parameters", self.sizes.parameters)
        if not kind.apart and "gradient_bytes" in summary:
            self.sizes.gradient_bytes[kind.ranks] = summary["gradient_bytes"]
        for _, _, run in commands:
            shutil.rmtree(run.path, ignore_errors=True)  # checkpoints are large
        if kind == RankLayout(1):
            self._step_ms = statistics.median(s.ms for s in runs[0])
        if kind.apart:
            self._late_s = max(self._late_s, lateness(runs))
            runs = together(runs, experiment.steps)
        return max(statistics.median(s.ms for s in run) for run in runs) if runs else None

    def _environment(self, place: int | None) -> dict[str, str]:
        """`place`: index among runs apart; each gets its own GPU."""
        env = dict(os.environ)
        if self.experiment.device == "cpu":
            env[THREADS] = str(self.experiment.threads)
        elif place is not None:
            env["CUDA_VISIBLE_DEVICES"] = self.experiment.gpus[place]
        return env

    def _run(self, commands: list[tuple[list[str], dict[str, str], RunDir]]) -> None:
        started: list[subprocess.Popen[bytes]] = []
        try:
            for argv, env, run in commands:
                with self._console(run).open("wb") as console:
                    started.append(
                        subprocess.Popen(
                            ["bash", *argv],  # see project.script
                            env=env,
                            stdin=subprocess.DEVNULL,
                            stdout=console,
                            stderr=console,
                            start_new_session=True,  # Ctrl-C reaches only this process
                            preexec_fn=functools.partial(process.die_with_parent, os.getpid()),  # noqa: PLW1509 – one thread
                        )
                    )
            left = dict(enumerate(started))
            while left:
                for i, popen in list(left.items()):
                    status = popen.poll()
                    if status is not None:
                        del left[i]
                    if status:
                        raise self._failed(commands[i][0], commands[i][2], status)
                time.sleep(POLL_S)
        finally:
            stop(started)

    def _console(self, run: RunDir) -> Path:
        return self.folder / f"{run.name}.console"

    def _failed(self, argv: list[str], run: RunDir, status: int) -> Failed:
        known = status in list(Exit) and status != Exit.DONE
        lines = [
            msg("cli.scaling.run_failed", ranks=plural(int(argv[1]), "rank"), status=status),
            what_happened(run, self._console(run)),
            msg("cli.scaling.run_command", command=shlex.join(argv)),
            msg("cli.scaling.run_kept", folder=self.folder),
        ]
        return Failed("\n".join(lines), status if known else int(Exit.TRAINING))


def steps(run: RunDir) -> list[StepTime]:
    """The training steps of a run after the warm-up."""
    records = (r for r in read_records(run.metrics) if r.get("step_ms") and "loss" in r)
    return [StepTime(r["time"], r["step_ms"]) for r in records if r["step"] > WARM_UP_STEPS]


def lateness(runs: list[list[StepTime]]) -> float:
    """Seconds between the first steps of the first run and of the last one."""
    begins = [run[0].end_s for run in runs if run]
    return max(begins) - min(begins) if begins else 0.0


def together(runs: list[list[StepTime]], wanted: int) -> list[list[StepTime]]:
    """The steps during which all runs were training; [] if too few of the `wanted` number."""
    if not all(runs):
        return []
    begin, end = (
        max(run[0].end_s - run[0].ms / 1000 for run in runs),
        min(run[-1].end_s for run in runs),
    )
    shared = [
        [s for s in run if s.end_s - s.ms / 1000 >= begin - 0.001 and s.end_s <= end + 0.001]
        for run in runs
    ]
    return shared if min(map(len, shared)) >= max(1, LEAST_OVERLAP * wanted) else []


def what_happened(run: RunDir, console: Path) -> str:
    """The failure card of a run, or the end of its output if it has none."""
    from training.diagnose import card

    record = read_failure(run.failure)
    if record:
        return card.of_run(record)
    lines = console.read_text(errors="replace").splitlines() if console.exists() else []
    first = next(
        (i for i, line in enumerate(lines) if line.startswith("[ERROR]")),
        max(0, len(lines) - SHOWN_LINES),
    )
    return "\n".join(f"    │ {line}" for line in lines[first : first + SHOWN_LINES])


def stop(started: list[subprocess.Popen[bytes]]) -> None:
    """End runs with all their ranks: a rank dies with its supervisor (prctl)."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for popen in started:
                if popen.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(popen.pid, number)
            end = time.monotonic() + STOP_S
            while any(p.poll() is None for p in started) and time.monotonic() < end:
                time.sleep(POLL_S)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _remove(folder: Path) -> None:
    """Remove a folder in which dying ranks may still write."""
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(POLL_S)
