"""Crash benchmark: kills a rank, worker, supervisor, launch script, guardian or all at once with
SIGKILL at random moments, and compares the result with an uninterrupted run, bit for bit.

    python -m benchmarks.crashes [--kills=100] [--seed=1] [--ranks=2] [--keep=FOLDER]

Half of the runs restart killed ranks automatically (train_dual_gpu_enhanced.sh), the others are
resumed by command. Exits with 1, and keeps the folders of the failing runs, unless: every
checkpoint is complete and has the weights of the uninterrupted run at that step; each start
continues from the newest one; only the steps since then are lost; no process of the run is left
after 8 s; the run finishes with the same weights, losses and sample.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from benchmarks import crash_proof as proof
from benchmarks.common import ROOT, environment
from benchmarks.crash_moments import (
    EVAL_EVERY,
    EVERYTHING,
    GUARDIAN,
    KEPT,
    LAUNCHER,
    LIMIT_S,
    SAVE_EVERY,
    STEPS,
    SUPERVISOR,
    Dealer,
    Moment,
    Watched,
    alive,
    below,
    described,
    kill,
    kind_of,
    reap,
    wait,
)
from benchmarks.crash_report import END, LOST, RESUME, SURVIVORS, TRACE, WEIGHTS, Tally, report
from training.core import heartbeat
from training.core.errors import Exit
from training.core.rundir import RunDir, read_json
from training.trainer.prepared_cache import CACHE

PR_SET_CHILD_SUBREAPER = 36
GONE_S = 8.0
KILLS_PER_RUN, KILLS_AFTER = 16, 2  # in total, and after the last checkpoint
TEXT_BYTES = 3300  # about ten steps per epoch
CONFIG = "configs/dual_gpu/quickstart.py"
TINY = {
    **{
        "depth": 1,
        "max_seq_len": 32,
        "device_batch_size": 4,
        "num_iterations": STEPS,
        "save_every": SAVE_EVERY,
        "eval_every": EVAL_EVERY,
    },
    **{
        "eval_tokens": 2048,
        "sample_tokens": 16,
        "num_workers": 1,
        "device": "cpu",
        "use_dummy_wandb": "true",
        "tensorboard": "false",
    },
    "report": "false",
}
TRACE_CHARACTERS = 4000
# a traceback that is not from a rank
TRACEBACK = re.compile(r'File "[^"]*/training/(cli|launcher|plan)/\w+\.py", line')


class Case:
    """One run, from its first start to its end, over any number of starts."""

    def __init__(
        self,
        folder: Path,
        text: Path,
        ranks: int,
        recovers: bool,
        whole: proof.Reference | None = None,
    ) -> None:
        self.folder, self.text, self.ranks, self.recovers = folder, text, ranks, recovers
        self.run = RunDir(folder / "run")
        self.whole, self.continuity = whole, proof.Continuity(self.run)
        self.problems: list[tuple[str, str]] = []  # kind, text
        self.story: list[str] = []
        self.starts, self._began = 0, time.monotonic()
        folder.mkdir(parents=True)

    def start(self) -> Watched:
        """Resumes the run, or starts it if it has no plan yet."""
        enhanced = self.recovers and self.ranks == 2
        command = (
            ["./train_dual_gpu_enhanced.sh"] if enhanced else ["./launch_train.sh", str(self.ranks)]
        )
        flags: dict[str, object] = {"out_dir": self.folder, "log_dir": self.folder}
        if self.run.plan.exists():
            flags["resume"] = "run"
        else:
            shutil.rmtree(self.run.path, ignore_errors=True)
            keep = {"keep_checkpoints": KEPT if self.whole else STEPS}
            flags |= {
                "config": CONFIG,
                "run_name": "run",
                "data": self.text,
                "total_batch_size": 128 * self.ranks,
                "retries": 0,
            }
            flags |= TINY | keep | ({"retries": 100} if self.recovers else {})
        self.starts += 1
        self.tell(f"start {self.starts}")
        with self.console.open("wb") as out:
            argv = [*command, *(f"--{name}={value}" for name, value in flags.items())]
            # A killed rank leaves folders of Python's multiprocessing: keep them out of /tmp.
            variables = environment(TMPDIR=str(self.folder.parent))
            popen = subprocess.Popen(
                argv, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        return Watched(popen, self.run, self.ranks)

    @property
    def console(self) -> Path:
        return self.folder / f"console{self.starts}.txt"

    def tell(self, text: str) -> None:
        self.story.append(f"{time.monotonic() - self._began:7.3f}  {text}")

    def wrong(self, kind: str, text: str) -> None:
        self.problems.append((kind, text))
        self.tell(f"WRONG ({kind}): {text}")


def torture(case: Case, dealer: Dealer, kills: int, tally: Tally, bar: tqdm[NoReturn]) -> int:
    """Kills the run up to `kills` times, then lets it finish. Returns the number of kills."""
    made, after, status = 0, 0, -1
    while status != Exit.DONE and not case.problems:
        launch, possible = case.start(), {int(Exit.DONE)}
        while made < kills and after < KILLS_AFTER and not case.problems and launch.running:
            moment = dealer.draw(supervised=launch.supervises, training=launch.begun() > 0)
            pids = launch.wait_for(moment, case.continuity.on_disk)
            if pids is None:
                break
            if not pids:
                case.tell(f"missed: {moment}")
                continue
            possible |= strike(case, launch, moment, pids, dealer, tally)
            made += 1
            after += case.continuity.on_disk == STEPS
            bar.update()
        if not launch.ended(LIMIT_S):
            case.wrong(RESUME, f"start {case.starts} did not finish: {launch.phases()}")
            kill(below(os.getpid()))
        status = launch.popen.wait()
        finish(case, status, possible, tally)
    return made


def strike(
    case: Case, launch: Watched, moment: Moment, pids: list[int], dealer: Dealer, tally: Tally
) -> set[int]:
    """Kills, then waits for the end of the launch or the supervisor's restart. Returns the possible
    exit statuses of the launch."""
    if moment.victim == LAUNCHER and launch.supervises:
        moment = replace(moment, victim=SUPERVISOR)
    kill(pids)
    struck = time.monotonic()
    everything, before = below(os.getpid()), launch.rank_pids()  # orphans too
    wait(lambda: not alive(pids), 1.0)
    beat, begun = launch.beat(moment.rank), launch.begun()  # the actual phase
    note(case, moment, beat, dealer, tally)
    if moment.victim == GUARDIAN:  # no effect on the run
        return set()

    def followed() -> bool:
        nonlocal begun
        begun = max(begun, launch.begun())
        return not launch.running or bool((now := launch.rank_pids()) and now != before)

    if not wait(followed, LIMIT_S):
        case.wrong(RESUME, f"no reaction to the death of {moment.victim} within {LIMIT_S:g} s")
        return set()
    old: list[int] | None = None
    if launch.running:
        tally.restarts += 1
        spared = (launch.popen.pid, *launch.victims(replace(moment, victim=GUARDIAN)))
        old = [pid for pid in everything if pid not in spared]

    def left() -> list[int]:
        return reap(launch.popen.pid) if old is None else alive(old)

    if not wait(lambda: not left(), GONE_S - (time.monotonic() - struck)):
        case.wrong(
            SURVIVORS, f"{GONE_S:g} s after the death of {moment.victim}: {described(left())}"
        )
        kill(left())
    tally.gone_s.append(time.monotonic() - struck)
    inventory(case, begun, tally)
    return (
        {-int(signal.SIGKILL)}
        if moment.victim in (LAUNCHER, SUPERVISOR, EVERYTHING)
        else {int(Exit.TRAINING)}
    )


def note(
    case: Case, moment: Moment, beat: heartbeat.HeartbeatRecord | None, dealer: Dealer, tally: Tally
) -> None:
    hit = "planning" if moment.victim == LAUNCHER else kind_of(beat) if beat else "before the ranks"
    dealer.hit[hit] += 1
    tally.kills[moment.victim, hit] += 1
    tally.aimed[moment.phase] += 1
    case.tell(
        f"{moment.victim} killed in '{beat or hit}' (aimed at '{moment.phase}' + "
        f"{moment.delay_s * 1e3:.2f} ms)"
    )


def inventory(case: Case, begun: int, tally: Tally) -> None:
    """Checks the checkpoints after a kill, with all ranks dead."""
    assert case.whole
    for text in proof.damaged(case.run, case.whole):
        case.wrong(WEIGHTS, text)
    if proof.half_written(case.run):
        tally.halves += 1
    saved = proof.newest(case.run)
    for text in case.continuity.problems(saved):
        case.wrong(LOST, text)
    if begun:
        tally.lost.append(proof.lost(begun, saved))
        if tally.lost[-1] > proof.most_lost(case.whole):
            case.wrong(
                LOST, f"step {begun} had begun, but the newest checkpoint is of step {saved}"
            )
    case.tell(f"  on disk: step {saved}")


def finish(case: Case, status: int, possible: set[int], tally: Tally) -> None:
    """Checks an ended start: killed, failed by a kill, or done."""
    assert case.whole
    case.tell(f"exit status {status}")
    console = case.console.read_text(errors="replace")
    if found := TRACEBACK.search(console):
        case.wrong(TRACE, f"{case.console.name}: …{console[found.start() :][:TRACE_CHARACTERS]}")
    if status not in possible:
        case.wrong(
            RESUME,
            f"start {case.starts} exited with {status}, which no kill explains: {console[-600:]}",
        )
    elif status == Exit.DONE:
        for text in proof.wrong_end(case.run, case.whole, launched=case.continuity.launched()):
            case.wrong(END, text)
        inventory(case, 0, tally)


def uninterrupted(folder: Path, text: Path, ranks: int) -> proof.Reference:
    case = Case(folder, text, ranks, recovers=False)
    if status := case.start().popen.wait():
        raise SystemExit(
            f"the uninterrupted run failed ({status}):\n{case.console.read_text()[-3000:]}"
        )
    return proof.reference(case.run)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, choices=range(1, 100_001), metavar="N")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the random draws; the actual moments still vary"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--keep", type=Path, help="folder for failing runs (default: a temporary folder)"
    )
    wanted = parser.parse_args()
    # Orphans become children of this process, so that no leftover is missed.
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1):
        raise SystemExit("prctl(PR_SET_CHILD_SUBREAPER) failed")
    folder, began = Path(tempfile.mkdtemp(prefix="crashes-")), time.monotonic()
    text = folder / "crashes.txt"
    text.write_bytes((ROOT / "LICENSE").read_bytes()[:TEXT_BYTES])
    tally, dealer, made, runs = Tally(), Dealer(random.Random(wanted.seed), wanted.ranks), 0, 0
    prepared = Path()
    try:
        whole = uninterrupted(folder / "whole", text, wanted.ranks)
        prepared = Path((read_json(RunDir(folder / "whole/run").data) or {})["folder"])
        with tqdm(total=wanted.kills, unit="kill", disable=None) as bar:
            while made < wanted.kills:
                # so that a kill can hit the data preparation too
                shutil.rmtree(prepared, ignore_errors=True)
                case = Case(
                    folder / f"run{runs + 1}",
                    text,
                    wanted.ranks,
                    recovers=runs % 2 == 1,
                    whole=whole,
                )
                made += torture(
                    case,
                    dealer,
                    min(wanted.kills - made, KILLS_PER_RUN, -(-wanted.kills // 2)),
                    tally,
                    bar,
                )
                runs += 1
                close(case, wanted.keep, tally)
    finally:
        kill(below(os.getpid()))
        for path in (prepared, CACHE / f".{prepared.name}.lock", CACHE / f".{prepared.name}.work"):
            if path.name.startswith((text.stem, f".{text.stem}")):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(
                    missing_ok=True
                )
        shutil.rmtree(folder)
    print(report(tally, runs, time.monotonic() - began))
    return 1 if tally.wrong else 0


def close(case: Case, keep: Path | None, tally: Tally) -> None:
    """Removes a correct run; keeps a failing one with its log."""
    tally.starts += case.starts
    tally.wrong.update(kind for kind, _ in case.problems)
    if not case.problems:
        shutil.rmtree(case.folder)
        return
    (case.folder / "story.txt").write_text("\n".join(case.story) + "\n")
    keep = keep or Path(tempfile.mkdtemp(prefix="wrong-"))
    keep.mkdir(parents=True, exist_ok=True)
    target = keep / case.folder.name
    shutil.rmtree(target, ignore_errors=True)
    shutil.move(case.folder, target)
    tqdm.write(
        "\n".join(
            [
                *(f"WRONG ({kind}): {text}" for kind, text in case.problems),
                f"kept: {target}/story.txt",
            ]
        )
    )


if __name__ == "__main__":
    sys.exit(main())
