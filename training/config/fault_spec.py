"""Fault injection, `--inject=FAULT@key=value,…[;FAULT@…]`: real faults that test diagnosis and
recovery. Parsed and checked before the start; ranks import nothing of it without the flag.

    --inject=kill@rank=1,step=5                               SIGKILL to rank 1 at the forward pass
                                                              of step 5
    --inject='stop@rank=0,phase=epoch 2: creating'            SIGSTOP when rank 0 creates the data
                                                              iterator of epoch 2
    --inject='corrupt@step=10;kill@rank=1,step=13,attempt=any'
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.config import fault_table as faults
from training.core import heartbeat
from training.core.errors import Problem
from training.core.messages import msg
from training.core.suggest import suggest

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues

LIST = "list"
ATTEMPT = "DUET_ATTEMPT"  # number of this start of the run, set by the supervisor
ALWAYS = "any"
MISSED = "warning.inject_missed"
STEP = 5  # default
# Key → (meaning, with the default in brackets; lowest integer, None: text or a fraction).
KEYS: dict[str, tuple[str, int | None]] = {
    "rank": (msg("config.fault_key.rank"), 0),
    "step": (msg("config.fault_key.step"), 1),
    "epoch": (msg("config.fault_key.epoch"), 1),
    "phase": (msg("config.fault_key.phase"), None),
    "call": (msg("config.fault_key.call"), 1),
    "attempt": (msg("config.fault_key.attempt"), 1),
    "worker": (msg("config.fault_key.worker"), 0),
    "seconds": (msg("config.fault_key.seconds"), None),
    "code": (msg("config.fault_key.code"), 0),
    "above": (msg("config.fault_key.above"), 0),
}
EXAMPLE = "--inject=kill@rank=1,step=5"
COMMON, WORKERS = (
    ("rank", "step", "epoch", "phase", "call", "attempt"),
    ("rank", "epoch", "worker", "call", "attempt"),
)


@dataclass(frozen=True, eq=False)
class Spec:
    """One requested fault. None: any."""

    text: str
    fault: faults.Fault
    rank: int
    step: int | None
    epoch: int | None
    phase: str
    call: int
    attempt: int | None
    worker: int
    seconds: float
    code: int
    above: int

    def now(self, phase: str, epoch: int, step: int) -> bool:
        return self.step in (None, step) and self.epoch in (None, epoch) and self.phase in phase


def overview() -> str:
    """The output of `--inject=list`."""
    lines = [
        msg("config.inject.usage"),
        "",
        msg("config.inject.faults"),
        faults.table(STEP),
    ]
    lines += [
        "",
        msg("config.inject.keys"),
        *(f"  {name:<9}{text}" for name, (text, _) in KEYS.items()),
    ]
    return "\n".join([*lines, "", msg("config.inject.places")])


def check(text: str, origin: str, ranks: int, workers: int) -> list[Problem]:
    """All problems of `text` for a run with this many ranks and data-loader workers."""
    if text == LIST:
        return []
    specs, problems = parse(text, ranks)
    wrong = [(what, allowed, fixes) for what, allowed, fixes in problems]
    for spec in specs:
        if spec.rank >= ranks:
            wrong.append(
                (
                    msg("config.inject.no_rank", rank=spec.rank, text=spec.text),
                    msg("config.inject.range", last=ranks - 1),
                    [],
                )
            )
        elif spec.fault.ranks == faults.MAIN and spec.rank:
            wrong.append(
                (
                    msg("config.inject.only_rank_0", name=spec.fault.name, rank=spec.rank),
                    "rank=0",
                    [],
                )
            )
        if (spec.fault.worker or spec.fault.with_workers) and spec.worker >= workers:
            what = msg(
                "config.inject.needs_worker",
                name=spec.fault.name,
                worker=spec.worker,
                workers=workers,
            )
            wrong.append((what, "", [f"--num_workers={spec.worker + 1}"]))
    return [
        Problem(
            "inject.value", msg("config.inject.problem", what=what, origin=origin), allowed, fixes
        )
        for what, allowed, fixes in wrong
    ]


def parse(text: str, ranks: int) -> tuple[list[Spec], list[tuple[str, str, list[str]]]]:
    """(valid faults, (problem, allowed, fixes)…)."""
    specs: list[Spec] = []
    wrong: list[tuple[str, str, list[str]]] = []
    for one in filter(None, (part.strip() for part in text.split(";"))):
        name, _, rest = one.partition("@")
        fault = faults.TABLE.get(name)
        if fault is None:
            near = suggest(name, list(faults.TABLE))
            fixes = [f"--inject={shlex.quote(one.replace(name, n, 1))}" for n in near]
            allowed = "" if near else ", ".join(faults.TABLE)
            what = msg("config.inject.unknown_fault", name=name)
            wrong.append((what, allowed, fixes or [f"--inject={LIST}"]))
            continue
        values, bad = _values(fault, rest)
        wrong += bad
        if not bad:
            specs.append(_spec(one, fault, values, ranks))
    if not specs and not wrong:
        wrong.append((msg("config.inject.no_fault"), "FAULT@key=value,…", [EXAMPLE]))
    return specs, wrong


def _spec(text: str, fault: faults.Fault, values: FieldValues, ranks: int) -> Spec:
    step, epoch, phase = values.get("step"), values.get("epoch"), values.get("phase")
    if (
        not fault.worker
        and step is None
        and epoch is None
        and phase is None
        and fault.phase in heartbeat.STEP_PHASES
    ):
        step = STEP
    if (
        epoch is not None
        and step is None
        and phase is None
        and fault.phase in heartbeat.STEP_PHASES
    ):
        phase = faults.CREATING
    return Spec(
        text=text,
        fault=fault,
        rank=values.get("rank", 0 if fault.ranks == faults.MAIN or ranks == 1 else 1),
        step=step,
        epoch=epoch,
        phase=fault.phase if phase is None else phase,
        call=values.get("call", 1),
        attempt=values.get("attempt", 1),
        worker=values.get("worker", 0),
        **{
            "seconds": 0.0,
            "code": 0,
            "above": 0,
            **fault.keys,
            **{k: v for k, v in values.items() if k in fault.keys},
        },
    )


def _values(fault: faults.Fault, text: str) -> tuple[FieldValues, list[tuple[str, str, list[str]]]]:
    allowed = [*(WORKERS if fault.worker else COMMON), *fault.keys]
    values: FieldValues = {}
    wrong: list[tuple[str, str, list[str]]] = []
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, raw = pair.partition("=")
        if not equals:
            wrong.append(
                (
                    msg("config.inject.no_value", pair=pair, name=fault.name),
                    f"{key}=…" if key in allowed else ", ".join(allowed),
                    [],
                )
            )
        elif key not in allowed:
            fixes = [f"{near}={raw}" for near in suggest(key, allowed)]
            wrong.append(
                (
                    msg("config.inject.unknown_key", key=key, name=fault.name),
                    ", ".join(allowed),
                    fixes,
                )
            )
        elif key in values:
            wrong.append(
                (
                    msg("config.inject.key_twice", key=key, name=fault.name),
                    msg("core.args.once"),
                    [],
                )
            )
        else:
            values[key], expected = _value(key, raw)
            if expected:
                wrong.append(
                    (
                        msg("config.inject.wrong_value", key=key, name=fault.name, raw=raw),
                        expected,
                        [],
                    )
                )
    return values, wrong


def _value(key: str, raw: str) -> tuple[Any, str]:
    """(value, '') or (None, allowed values)."""
    if key == "phase":
        return raw, "" if raw else msg("config.inject.phase")
    if key == "attempt" and raw == ALWAYS:
        return None, ""
    low = KEYS[key][1]
    try:
        value: float = float(raw) if low is None else int(raw)
    except ValueError:
        value = math.nan
    if low is None:
        return value, "" if 0 < value < math.inf else msg("config.inject.seconds")
    if value >= low and (key != "code" or value < 256):
        return value, ""
    return None, msg("config.inject.whole_number", low=low) + {
        "code": msg("config.inject.to_255"),
        "attempt": msg("config.inject.or_any", word=ALWAYS),
    }.get(key, "")
