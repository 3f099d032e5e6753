"""Does a run survive kill -9 of anything at any time? Kills rank, worker, supervisor, launch
script, guardian or all at once, again and again, and compares what comes out with a run that nobody
touched: bit for bit.

    python -m benchmarks.crashes [--kills=100] [--seed=1] [--ranks=2] [--keep=FOLDER]

Half of the runs restart killed ranks by themselves (train_dual_gpu_enhanced.sh), the others are
resumed by command. Exits with 1, and keeps the folders of those runs, when anything of this is not
so: every checkpoint is whole and has the weights that the untouched run had at that step; a start
goes on from the newest one; nothing is lost but the steps since; no process of the run is left
after 8 s; the run comes to its end with the same weights, losses and sample.
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
KILLS_PER_RUN, KILLS_AFTER = 16, 2  # in all, and of those after the last checkpoint
TEXT_BYTES = 3300  # some ten steps an epoch
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
# a traceback that is no rank's
OURS = re.compile(r'File "[^"]*/training/(cli|launcher|plan)/\w+\.py", line')


class Case:
    """One run, from its first start to its end, however many starts that takes."""

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
        """Anew as long as there is no plan: then it has never begun."""
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
            # Whose rank is killed leaves folders of Python's multiprocessing; not in the user's
            # /tmp.
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
    """Kill the run up to so many times, then let it come to its end. Returns the kills."""
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
            case.wrong(RESUME, f"start {case.starts} does not come to its end: {launch.phases()}")
            kill(below(os.getpid()))
        status = launch.popen.wait()
        finish(case, status, possible, tally)
    return made


def strike(
    case: Case, launch: Watched, moment: Moment, pids: list[int], dealer: Dealer, tally: Tally
) -> set[int]:
    """Kill, and wait for what follows: the end of the launch, or the supervisor's restart. Returns
    the statuses that it may leave with."""
    if moment.victim == LAUNCHER and launch.supervises:
        moment = replace(moment, victim=SUPERVISOR)
    kill(pids)
    struck = time.monotonic()
    everybody, before = below(os.getpid()), launch.rank_pids()  # orphans too
    wait(lambda: not alive(pids), 1.0)
    beat, begun = launch.beat(moment.rank), launch.begun()  # where it really was
    note(case, moment, beat, dealer, tally)
    if moment.victim == GUARDIAN:  # nobody misses it
        return set()

    def followed() -> bool:
        nonlocal begun
        begun = max(begun, launch.begun())
        return not launch.running or bool((now := launch.rank_pids()) and now != before)

    if not wait(followed, LIMIT_S):
        case.wrong(RESUME, f"nothing follows the death of {moment.victim} within {LIMIT_S:g} s")
        return set()
    old: list[int] | None = None
    if launch.running:
        tally.restarts += 1
        spared = (launch.popen.pid, *launch.victims(replace(moment, victim=GUARDIAN)))
        old = [pid for pid in everybody if pid not in spared]

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
    hit = (
        "planning"
        if moment.victim == LAUNCHER
        else heartbeat.kind(beat.phase)
        if beat
        else "before the ranks"
    )
    dealer.hit[hit] += 1
    tally.kills[moment.victim, hit] += 1
    tally.aimed[moment.phase] += 1
    case.tell(
        f"{moment.victim} killed in '{beat or hit}' (aimed at '{moment.phase}' + "
        f"{moment.delay_s * 1e3:.2f} ms)"
    )


def inventory(case: Case, begun: int, tally: Tally) -> None:
    """After a kill, when nobody writes any more."""
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
                LOST, f"step {begun} had been begun, the newest checkpoint is of step {saved}"
            )
    case.tell(f"  on the disk: step {saved}")


def finish(case: Case, status: int, possible: set[int], tally: Tally) -> None:
    """A start has ended: killed, failed by a kill, or done."""
    assert case.whole
    case.tell(f"left with {status}")
    console = case.console.read_text(errors="replace")
    if OURS.search(console):
        case.wrong(TRACE, f"see {case.console.name}")
    if status not in possible:
        case.wrong(
            RESUME,
            f"start {case.starts} left with {status}, which no kill explains: {console[-600:]}",
        )
    elif status == Exit.DONE:
        for text in proof.wrong_end(case.run, case.whole):
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
        "--seed", type=int, default=1, help="of what is drawn; moments come out otherwise each time"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--keep", type=Path, help="where the folders of wrong runs go (default: a temporary folder)"
    )
    wanted = parser.parse_args()
    # Whatever loses its parent becomes ours: nothing that is left can hide.
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1):
        raise SystemExit("prctl(PR_SET_CHILD_SUBREAPER) is refused")
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
                # the preparation of the data can be hit, too
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
    """A wrong run is kept, with its story."""
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
