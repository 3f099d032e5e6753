"""Advice from the catalogue, filled with values of the run and of the matched log line."""

from __future__ import annotations

import contextlib
import re
import resource
import shlex
import shutil
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from training import tasks
from training.config.batch import smaller
from training.core import cause_ids, inodes, manifest, phases, units
from training.core.matching import matching
from training.core.next_command import next_command, submission_of
from training.core.rundir import RunDir
from training.core.units import GIB
from training.diagnose import full_disk, gpu_occupants, hang_advice, rooted, signatures
from training.diagnose.exception_cause import is_damage
from training.diagnose.hang_advice import CHECKPOINTED, NO_WORKERS, RESUME_COMMAND
from training.diagnose.signatures import LocalizedText, Signature
from training.tasks.memory import gib, with_ample_margin

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan
    from training.core.contracts.verdict import EndRecord, ExhaustedMemoryRecord

MOST = 6  # sentences: one screen
STACKS = 4  # files that are named
OTHERWISE = " || "
# Causes whose advice for a run only names its logs. A text of the second one is the first one if it
# is of an exception.
GENERAL = (cause_ids.RAISED, cause_ids.UNKNOWN)
RETRIES = "--retries=3"  # proposed where a script has none
# a DataLoader, or another start of processes
IN_WORKERS = re.compile(r"/torch/utils/data/|/multiprocessing/\w+\.py")
LIGHTER_IN = "lighter in "  # + phase
# values about a smaller micro-batch
SMALLER = {"size", "factor", "smaller_command", "fits_gib", "smallest", "lighter_command"}
ESTIMATED = "estimated_bytes"  # the plan's estimate of a rank on a GPU
CRASH_STACKS = "crash_stacks"  # value: their files
RANK_STACKS = "stacks"  # value: their folder; only of runs of Duet
# Whether the card has the kernel's messages: empty values, one of which is known.
KERNEL_READ, KERNEL_UNREAD = "kernel_read", "kernel_unread"
STATUS_0 = "status_0"  # an empty value: the rank may have ended with status 0
COMMANDS = (RESUME_COMMAND, NO_WORKERS)  # values also for a signature's own advice
# An empty value: only the general advice is about restoring a GPU.
GPU_RESET, RESTORES = "gpu_reset", re.compile(r"\b(reset|reboot)\b")
DAMAGED = "damaged"  # an empty value: the error is about a damaged data file
FORMAT = string.Formatter()


def advice(
    cause: str,
    signature: Signature | None,
    groups: Mapping[str, str],
    run_values: Mapping[str, str] | None = None,
) -> list[str]:
    """Best first. `run_values`: of a Duet run (`values`). A sentence with an unknown value is
    omitted.

    A signature's own advice is complete; the general advice of its cause is used only for
    signatures without any."""
    known = signatures.causes().get(cause) or signatures.causes()[cause_ids.UNKNOWN]
    commands = {n: text for n, text in (run_values or {}).items() if n in COMMANDS}
    special = (
        filled(signature.advice, {**commands, **groups})
        if signature and _is_of(signature, cause)
        else []
    )
    restores = _restores(signature, cause)
    general = {} if restores else {GPU_RESET: ""}
    if run_values and (own := filled(known.ours, {**general, **groups, **run_values})):
        special = [s for s in special if not _repeats(s, own, known.same)]
        first = cause in GENERAL or restores
        return _first_ones([*special, *own] if first else [*own, *special])
    return _first_ones(special or filled(known.advice, groups))


def _restores(signature: Signature | None, cause: str) -> bool:
    """Does the signature have its own advice on how a failed GPU is restored?"""
    if signature is None or not signature.cause == cause == cause_ids.GPU_HARDWARE:
        return False
    return any(map(RESTORES.search, signature.advice.en))


def _is_of(signature: Signature, cause: str) -> bool:
    return signature.cause == cause or (signature.cause in GENERAL and cause in GENERAL)


def by_frames(trace: Iterable[str]) -> dict[str, str]:
    """Values for a signature's advice, by the lines or frames of a traceback."""
    return {"worker": "worker"} if any(map(IN_WORKERS.search, trace)) else {}


def _repeats(sentence: str, others: Sequence[str], topics: Sequence[str]) -> bool:
    """Whether one of `others` is about the same topic."""
    return any(
        re.search(topic, sentence) and any(re.search(topic, other) for other in others)
        for topic in topics
    )


def _first_ones(sentences: list[str]) -> list[str]:
    return list(dict.fromkeys(sentences))[:MOST]


def of_end(
    end: EndRecord,
    signature: Signature | None,
    groups: Mapping[str, str],
    run_values: Mapping[str, str],
) -> list[str]:
    """For a failed or stopped Duet run, by its `kind`, `cause` and `status` (failure.json)."""
    kind, cause = end.get("kind"), end["cause"]
    if end.get("torn_down"):
        return of_kind("torn_down", run_values)
    if end.get("may_end"):
        place = {"where": end["where"]} if end["where"] else dict[str, str]()
        return of_kind("may_end", {**run_values, **place})
    if end.get("spawns"):
        return of_kind("spawns", run_values)
    if kind == "uneven" and hang_advice.some_left(end):
        return of_kind("left", run_values)
    if kind == "uneven" and end["rank"] is None:  # all ranks wait, in different places
        return of_kind("branch", run_values)
    if kind in signatures.kinds():
        return of_kind(kind, run_values)
    if signature is None and (cause in GENERAL or not signatures.causes()[cause].ours.sentences()):
        from training.diagnose import scan

        signature, groups = scan.named(end["summary"], GENERAL if cause in GENERAL else (cause,))
    groups = {**groups, **by_frames(end.get("evidence", []))}
    if (kernel := end.get("kernel")) and kernel["source"]:
        groups = {**groups, KERNEL_READ: ""}
        run_values = {name: one for name, one in run_values.items() if name != KERNEL_UNREAD}
    if end.get("status"):
        run_values = {name: one for name, one in run_values.items() if name != STATUS_0}
    if folder := end.get("stacks"):
        groups = {**groups, RANK_STACKS: shlex.quote(folder)}
    log = end.get("log")
    if end.get("where") and kind == "died" and isinstance(log, str):  # that has the stacks, then
        groups = {CRASH_STACKS: shlex.quote(log), **groups}
    if held := end.get("occupied"):
        left = {name: value for name, value in run_values.items() if name not in SMALLER}
        return advice(cause, signature, groups, left | gpu_occupants.values(held))
    if cause == cause_ids.HANG:
        run_values = hang_advice.values(end, run_values)
    judged = _beyond_estimate(run_values, end.get("memory"))
    known = full_disk.with_folder(end, _in_phase(judged, end.get("phase")))
    if kind == "error" and (where := end.get("where")):
        known["raised_at"] = where
        if cause == cause_ids.RAISED and is_damage(end["summary"]):
            known[DAMAGED] = ""
    sentences = advice(cause, signature, groups, known)
    return [*of_kind("root", known), *sentences] if rooted.all_in_one(end) else sentences


def _beyond_estimate(
    run_values: Mapping[str, str], memory: ExhaustedMemoryRecord | None
) -> Mapping[str, str]:
    """With the values of a GPU on which far more was allocated than estimated: then the estimate of
    a smaller micro-batch is of no use."""
    if not memory or ESTIMATED not in run_values:
        return run_values
    allocated, estimated = memory["allocated_bytes"], int(run_values[ESTIMATED])
    if allocated < with_ample_margin(estimated):
        return run_values
    return {**run_values, "allocated": gib(allocated), "estimated": gib(estimated)}


def _in_phase(run_values: Mapping[str, str], phase: object) -> Mapping[str, str]:
    """Without the values of a smaller micro-batch if it does not lower the memory of the phase."""
    lighter = run_values.get(f"{LIGHTER_IN}{phase}")
    if not lighter:
        return run_values
    left = {name: value for name, value in run_values.items() if name not in SMALLER}
    return left | {"phase": str(phase), "phase_lighter": lighter}


def of_kind(kind: str, run_values: Mapping[str, str]) -> list[str]:
    """For an observation of the supervisor (signatures/kinds.json)."""
    return filled(signatures.kinds()[kind], run_values)


def filled(text: LocalizedText, values: Mapping[str, str]) -> list[str]:
    """The sentences whose values are all known; the first such alternative of
    `with {port} || without`."""
    found = []
    for sentence in text.sentences():
        usable = next(
            (one for one in sentence.split(OTHERWISE) if _names(one) <= values.keys()), None
        )
        if usable is not None:
            found.append(usable.format_map(values))
    return found


def _names(sentence: str) -> set[str]:
    return {name for _, name, _, _ in FORMAT.parse(sentence) if name}


def values(run: RunDir, plan: Plan) -> dict[str, str]:
    """Values of a Duet run for advice; only a few for a user script."""
    found = {
        "ranks": plan["ranks"],
        "parent": shlex.quote(str(run.path.parent)),
        KERNEL_UNREAD: "",
        STATUS_0: "",
    }
    if not run.is_gone():  # moved or removed: no sentence names its files
        found |= {
            "run": shlex.quote(str(run.path)),
            "ranks_folder": shlex.quote(str(run.ranks)),
        }
    if crashed := [shlex.quote(str(p)) for p in matching(run.ranks, "rank*.stacks") if _size(p)]:
        found[CRASH_STACKS] = " ".join(crashed[:STACKS])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found["nofile"] = soft
    if soft < hard or hard == resource.RLIM_INFINITY != soft:
        found["nofile_most"] = "unlimited" if hard == resource.RLIM_INFINITY else hard
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if largest != resource.RLIM_INFINITY:
        found["file_limit"] = units.size(largest)
    with contextlib.suppress(OSError):  # the run directory was moved: the sentence is omitted
        if inodes.exhausted(run.path):
            found["no_inodes"] = found["parent"]
        else:
            found["free_mb"] = f"{shutil.disk_usage(run.path).free / 1e6:.0f}"
    if "script" in plan and "retries" in plan and not plan["retries"]["value"]:
        found["retries_flag"] = RETRIES
    if "config" in plan and "batch" in plan:
        found |= _training(run, plan)
    return {name: str(value) for name, value in found.items()}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _training(run: RunDir, plan: Plan) -> dict[str, object]:
    command: Callable[..., str] = lambda **changes: next_command(plan, run, **changes)  # noqa: E731
    config, batch = plan["config"], plan["batch"]
    now, total = batch["device_sequences"], config["total_batch_size"]
    found: dict[str, object] = {
        RESUME_COMMAND: command(),
        "dry_run_command": f"{command()} --dry_run",
        "now": now,
        "total": total,
        "unit": tasks.task_of(plan)["unit"],
    }
    if manifest.all_in(run.checkpoints):
        found[CHECKPOINTED] = ""
    if submission_of(plan, run):
        found["submit_command"] = command()
    else:
        found["check_command"] = f"{command()} --check"
    if workers := config.get("num_workers"):
        fewer = workers // 2 if workers > 2 else 0
        found["fewer_workers_command"] = command(num_workers=fewer)
        found[NO_WORKERS] = command(num_workers=0)
    if not config.get("find_unused_parameters", True):
        found["unused_command"] = command(find_unused_parameters="true")
    if "precision" in plan and plan["precision"]["value"] != "fp32":
        found["fp32_command"] = command(precision="fp32")
    spec = tasks.spec_of(plan)
    if rates := spec.learning_rates(plan):
        halved = {name: f"{rate / 2:g}" for name, rate in rates.items()}
        found["slower_command"] = command(**halved)
    found |= {
        f"{LIGHTER_IN}{phase}": lighter
        for phase in (*phases.STARTING, *phases.BETWEEN)
        if (lighter := spec.lighter_in(phase))
    }
    needs = plan["memory"]["total_bytes"] if plan["gpus"] and "memory" in plan else None
    if needs is not None:
        found[ESTIMATED] = needs
    size = smaller(now, batch["seq_len"], batch["world_size"], total)
    if size is None:
        found |= {"smallest": now, "lighter": spec.lighter_than(plan)}
        savings = spec.savings(plan)
        return found | ({"lighter_command": command(**savings)} if savings else {})
    found |= {
        "size": size,
        "factor": f"{now / size:g}",
        "smaller_command": command(device_batch_size=size),
    }
    if needs is not None and (step := tasks.step_of(plan, size)):
        found |= {
            "fits_gib": f"{step.estimate.total / GIB:.1f}",
            "needs_gib": f"{needs / GIB:.1f}",
        }
        sizes = [gpu["total_bytes"] for gpu in plan["gpus"] if gpu["total_bytes"] is not None]
        if len(sizes) == len(plan["gpus"]):
            found["gpu_gib"] = f"{min(sizes) / GIB:.1f}"
        if found["fits_gib"] == found["needs_gib"]:
            del found["fits_gib"]
    return found
