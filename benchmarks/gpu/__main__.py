"""Measure this machine's GPUs: python3 -m benchmarks.gpu [--stages=NAME,…] (see __init__.py)."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from pathlib import Path

from benchmarks.flags import NANOCHAT_DIR, nanochat_checkout
from benchmarks.gpu import machine, results, stages
from training.core.errors import Exit

OUT = machine.ROOT / "experiments/gpu"
SMOKE_OUT = machine.ROOT / "experiments/gpu_smoke"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--stages", default="", help=f"of {', '.join(stages.STAGES)}; all if empty")
    parser.add_argument("--again", action="store_true", help="also stages that are done")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: figures mean nothing")
    parser.add_argument(
        "--limit", type=float, default=stages.LIMIT_S, help="seconds of a stage (%(default).0f)"
    )
    parser.add_argument(
        "--out", type=_path, help=f"folder of the results ({OUT}, with --smoke {SMOKE_OUT})"
    )
    parser.add_argument("--python", default="", help="Python of the trainings")
    parser.add_argument(
        "--nanochat",
        metavar="DIR",
        type=nanochat_checkout,
        default=os.environ.get(NANOCHAT_DIR) or None,
        help=f"a checkout of nanochat, measured too (also {NANOCHAT_DIR})",
    )
    wanted = parser.parse_args(argv)
    names = list(filter(None, wanted.stages.split(",")))
    if unknown := [name for name in names if name not in stages.STAGES]:
        parser.error(f"unknown stage {', '.join(unknown)}; allowed: {', '.join(stages.STAGES)}")
    wanted.stages = [stages.STAGES[name] for name in names or stages.STAGES]
    if wanted.python.startswith("~"):
        wanted.python = str(_path(wanted.python))
    wanted.out = (wanted.out or (SMOKE_OUT if wanted.smoke else OUT)).resolve()
    return wanted


def _path(text: str) -> Path:
    """The shell leaves the ~ in GPU_FLAGS=--out=~/results."""
    return Path(text).expanduser()


def main() -> int:
    wanted = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that programs are ended
    try:
        return _measure(wanted)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues with this stage", file=sys.stderr)
        return int(Exit.INTERRUPTED)


def _measure(wanted: argparse.Namespace) -> int:
    try:
        results.refuse_unusable(wanted.out)
        return _measure_into(wanted)
    except results.Unusable as reason:
        fix = "make gpu GPU_FLAGS=--out=FOLDER"
        print(f"[ERROR] {reason}\n    try:     {fix}", file=sys.stderr)
    except results.Busy as other:
        print(f"[ERROR] {other}", file=sys.stderr)
    except OSError as error:  # a full disk
        print(f"\n[ERROR] {wanted.out}: {error.strerror or error}", file=sys.stderr)
    return int(Exit.RESOURCES)


def _measure_into(wanted: argparse.Namespace) -> int:
    try:
        found = machine.find(machine.cache_of(wanted.out), wanted.python)
    except machine.NoGpu as reasons:
        fix = "make gpu GPU_FLAGS=--python=PATH"
        print(f"[ERROR] no Python with a GPU:\n{reasons}\n    try:     {fix}", file=sys.stderr)
        return int(Exit.RESOURCES)
    session = stages.Session(
        machine=found,
        folder=wanted.out,
        commit=machine.commit(),
        smoke=wanted.smoke,
        nanochat=wanted.nanochat,
        limit_s=wanted.limit,
    )
    if not session.meant and (real := results.Results(session)).are_meant():
        fix = f"--out={session.folder}_smoke"
        lost = f"{real.json} has real figures, which these would replace"
        print(f"[ERROR] {lost}\n    try:     {fix}", file=sys.stderr)
        return int(Exit.CONFIG)
    driver = f"driver {found.driver or 'unknown'}"
    print(f"{found.title}, {driver}, torch {found.torch}, {found.executable}")
    if lacks := [name for name in found.missing if name not in ("tensorboard", "pytest")]:
        print(f"not installed, replaced for the measurement: {', '.join(lacks)}")
    for line in found.in_use:
        print(f"[WARNING] {line}: measured beside other work; --again measures later")
    with results.alone(session.folder):
        return _all(session, wanted.stages, again=wanted.again)


def _all(session: stages.Session, chosen: list[stages.Stage], *, again: bool) -> int:
    kept = results.Results(session)
    records = []
    for stage in chosen:
        record = None if again else kept.before(stage)
        if record and record["status"] == stages.DONE:
            print(f"{stage.name:<18}{'before':>8}{_outcome(record, session.meant)}", flush=True)
            records.append(record)
            continue
        print(f"{stage.name:<18}", end="", flush=True)
        kept.keep(stage, None)
        record = session.measure(stage)
        _keep(kept, stage, record)
        print(f"{record['seconds']:6.0f} s{_outcome(record, session.meant)}", flush=True)
        records.append(record)
    print(f"\n{kept.html}\n{kept.json}")
    failed = any(record["status"] == stages.FAILED for record in records)
    missed = session.meant and any(stages.bad_checks(record) for record in records)
    return int(failed or missed)


def _keep(kept: results.Results, stage: stages.Stage, record: stages.Record) -> None:
    """On a full disk without the files of the stage, if it failed; else the record is printed."""
    try:
        kept.keep(stage, record)
    except OSError:
        shutil.rmtree(kept.session.files(stage), ignore_errors=True)
        try:
            kept.keep(stage, record)
        except OSError:
            print(f"\n{json.dumps({stage.name: record})}", flush=True)
            raise


def _outcome(record: stages.Record, meant: bool) -> str:
    """`meant`: the checks count."""
    if record["status"] != stages.DONE:
        first = record["reason"].partition("\n")[0]  # the output of a program may follow
        return f"  {record['status']}: {first.rstrip(': ')}"
    bad = stages.bad_checks(record) if meant else []
    return "  done" + "".join(f"\n{'':<28}✗ {check['name']}: {check['text']}" for check in bad)


if __name__ == "__main__":
    sys.exit(main())
