"""Log diagnosis: accuracy, speed, and results for real failures without a supervisor.

    python -m benchmarks.diagnosis [--only=accuracy,speed,faults] [--mb=1000]

accuracy   all logs of tests/fixtures/logs by cause: share of right causes, ranks and lines
speed      a healthy log of --mb megabytes, against `grep -E` with the same patterns: medians of
           three, interleaved; peak memory of both; then a log of the same size in which every line
           looks like a failure
faults     each fault in two ranks under bare torchrun, without supervisor and heartbeat, diagnosed
           from the log alone; gloo's timeout is 8 s, so that a hang leaves a message
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from benchmarks import faults
from benchmarks.common import ROOT, environment
from training.diagnose import signatures
from training.diagnose.result import diagnose

LOGS = ROOT / "tests" / "fixtures" / "logs"
ROUNDS = 3
TIMEOUT_S = 8
LIMIT_S = 60
# Script fault → right causes, and the rank if the log can show it.
EXPECTED = {
    "sleep": ({"collective_timeout"}, None),
    "worker": ({"collective_timeout"}, None),
    "spin": ({"collective_timeout"}, None),
    "gil": ({"collective_timeout"}, None),
    "stop": ({"collective_timeout"}, None),
    "uneven": ({"collective_timeout", "peer_died"}, None),
    "desync": ({"collective_timeout", "ddp_params_mismatch"}, None),
    "kill": ({"killed"}, 0),
    "segv": ({"segfault"}, 0),
    "exit0": ({"peer_died"}, None),
    "raise": ({"exception"}, 0),
    "worker_kill": ({"dataloader_worker_died"}, 0),
}


def accuracy() -> None:
    expected = json.loads((LOGS / "expected.json").read_text())
    rows: dict[str, list[tuple[bool, bool, bool]]] = collections.defaultdict(list)
    for name, wanted in tqdm(expected.items(), unit="log", disable=None):
        cause = name.partition("/")[0]
        found = diagnose([LOGS / name])
        right = found["cause"] in (cause, *wanted.get("or_cause", []))
        rank = found["rank"] in (wanted["rank"], *wanted.get("or_rank", []))
        line = wanted["line"] == "any" or found["line"] in (
            wanted["line"],
            *wanted.get("or_line", []),
        )
        rows[cause].append((right, rank, line))
    print("| cause | logs | cause right | rank right | line right |\n|---|---|---|---|---|")
    for cause in sorted(rows):
        print(
            f"| {cause} | {len(rows[cause])} | "
            + " | ".join(str(sum(column)) for column in zip(*rows[cause], strict=True))
            + " |"
        )
    every = [row for found in rows.values() for row in found]
    print(
        f"| all | {len(every)} | "
        + " | ".join(str(sum(column)) for column in zip(*every, strict=True))
        + " |"
    )


def healthy(path: Path, megabytes: int) -> None:
    """Lines of several trainers, with alarming words."""
    random.seed(1)
    block = []
    for i in range(20_000):
        loss = random.random()
        block.append(
            f"[2025-11-06 10:00:{i % 60:02d}] Epoch: {i // 1000}, Iter: {i}, Loss: {loss:.4f}, "
            f"error: 0.0{i % 100}, grad_norm: 0.31"
        )
        block.append(
            f"step {i:05d}/20000 ({i / 200:.2f}%) | loss: {loss:.6f} | lrm: 1.00 | dt: 412.21ms | "
            f"tok/sec: 118,300 | mfu: 41.20"
        )
        if i % 7 == 0:
            block.append(
                f"\r 37%|███▋      | {i}/50000 [01:22<02:20,  3.80it/s, loss=0.{i % 1000}]"
            )
        if i % 11 == 0:
            block.append(
                f"W1106 10:00:00.1 worker INFO timeout=1800 nccl watchdog started, val_error "
                f"0.2{i}, saving /data/exp_{i}/epoch.pt"
            )
    _repeat(path, ("\n".join(block) + "\n").encode(), megabytes)


def hostile(path: Path, megabytes: int) -> None:
    """Long lines that each start with a sample of the catalogue."""
    lines = [
        f"{sample} {'a' * 200}" for entry in signatures.signatures() for sample in entry.samples
    ]
    _repeat(path, ("\n".join(lines) + "\n").encode(), megabytes)


def _repeat(path: Path, block: bytes, megabytes: int) -> None:
    with path.open("wb") as file:
        for _ in range(max(1, megabytes * 1_000_000 // len(block))):
            file.write(block)


def for_grep(pattern: str) -> str:
    """The pattern in POSIX syntax: without names, lazy repeats and Perl classes."""
    pattern = (
        re.sub(r"\(\?P<\w+>", "(", pattern)
        .replace("(?:", "(")
        .replace("*?", "*")
        .replace("+?", "+")
        .replace("??", "?")
    )
    for perl, posix in {
        r"\d": "[0-9]",
        r"\s": "[[:space:]]",
        r"\S": "[^[:space:]]",
        r"\'": "'",
        r"\"": '"',
        r"\-": "-",
    }.items():
        pattern = pattern.replace(perl, posix)
    return pattern


def speed(megabytes: int) -> None:
    patterns = [for_grep(p) for s in signatures.signatures() for p in s.patterns]
    with tempfile.TemporaryDirectory() as place:
        log, list_of_patterns = Path(place, "log"), Path(place, "patterns")
        usable = [
            p
            for p in patterns
            if subprocess.run(
                ["grep", "-E", "-e", p, "/dev/null"], capture_output=True, check=False
            ).returncode
            < 2
        ]
        list_of_patterns.write_text("\n".join(usable) + "\n")
        commands = {
            "diagnose": [sys.executable, "-m", "training.cli.diagnose", str(log), "--json"],
            "grep -E": ["grep", "-a", "-c", "-E", "-f", str(list_of_patterns), str(log)],
        }
        for kind, make in (("healthy", healthy), ("hostile", hostile)):
            size = megabytes if kind == "healthy" else max(1, megabytes // 10)
            make(log, size)
            found: dict[str, list[tuple[float, float, float]]] = {
                name: [] for name in commands if kind == "healthy" or name == "diagnose"
            }
            for _ in tqdm(range(ROUNDS), unit=f" round, {kind}", disable=None):
                for name, took in found.items():
                    took.append(_measured(commands[name]))
            for name, took in found.items():
                wall, cpu, memory = (
                    statistics.median(column) for column in zip(*took, strict=True)
                )
                print(
                    f"{kind} log, {size} MB, {name:9} {wall:6.2f} s, {cpu:6.2f} s CPU, "
                    f"{size / cpu:5.0f} MB/s per core, {memory:4.0f} MiB"
                )
            if "grep -E" in found:
                ratio = statistics.median(g[1] for g in found["grep -E"]) / statistics.median(
                    d[1] for d in found["diagnose"]
                )
                print(
                    f"grep -E : diagnose = {ratio:.2f} in CPU time ({len(usable)} of "
                    f"{len(patterns)} patterns are possible in POSIX)"
                )


def _measured(command: list[str]) -> tuple[float, float, float]:
    """(seconds, CPU seconds, peak MiB)."""
    began = time.perf_counter()
    child = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, env=environment(LC_ALL="C.UTF-8")
    )
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode > 1:  # grep exits with 1 without a match
        sys.exit(f"{command[0]} failed ({child.returncode})")
    return time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def unwatched() -> None:
    print("| fault | diagnosis from the log | right |\n|---|---|---|")
    os.environ["GROUP_TIMEOUT_S"] = str(TIMEOUT_S)
    for what, (_, fault) in faults.FAULTS.items():
        if not fault:
            continue
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            faults.SCRIPT,
            fault,
        ]
        output = faults.until_ended(command, LIMIT_S)
        with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
            log.write(output)
            log.flush()
            found = diagnose([Path(log.name)])
        causes, rank = EXPECTED[fault]
        right = found["cause"] in causes and (rank is None or found["rank"] == rank)
        who = "" if found["rank"] is None else f", rank {found['rank']}"
        print(
            f"| {what} | {found['cause']}{who}: {found['evidence'].strip()[:90]} | "
            f"{'yes' if right else 'no'} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="accuracy,speed,faults")
    parser.add_argument("--mb", type=int, default=1000)
    wanted = parser.parse_args()
    only = set(wanted.only.split(","))
    if "accuracy" in only:
        accuracy()
    if "speed" in only:
        speed(wanted.mb)
    if "faults" in only:
        unwatched()


if __name__ == "__main__":
    main()
