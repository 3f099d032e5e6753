"""The plan of a restart: other settings, or other ranks, and every value that depends on them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from training import tasks
from training.config import batch
from training.config.schema import Config
from training.core import cause_ids, rundir
from training.core.messages import msg
from training.host import decisions, env_vars, visible_devices
from training.host.gpus import VISIBLE
from training.launcher import seats
from training.plan import batch_text
from training.tasks.memory import SAVINGS

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues
    from training.core.contracts.plan import GpuRecord, LostRank, Plan
    from training.launcher.restart import Restart, Team


# causes after which a GPU that works again is tried once more
DEFECTIVE = (cause_ids.GPU_HARDWARE, cause_ids.NO_GPU)


def changed_plan(plan: Plan, changes: FieldValues, why: str) -> Plan:
    """The plan with these fields changed, and every value that depends on them."""
    others = {name: value for name, value in changes.items() if name != "device_batch_size"}
    changed = plan | {
        "config": plan["config"] | others,
        "origins": plan["origins"] | dict.fromkeys(others, msg("launcher.retry.origin", why=why)),
    }
    if "device_batch_size" in changes:
        size = changes["device_batch_size"]
        changed = _with_batch(plan, changed, size, plan["batch"]["world_size"], why)
        if any(name in plan for name in SAVINGS):
            changed |= {"keeps_savings": True}
        if "elastic" in plan:  # an upper limit for any number of ranks
            changed |= {"elastic": {**plan["elastic"], "device_batch_size": size}}
    return changed


def after(plan: Plan, chosen: Restart) -> Plan:
    """The plan of a restart. Its ranks were chosen for the plan with its changes."""
    changed = with_changes(plan, chosen)
    return with_team(changed, chosen.team, chosen.why) if chosen.team else changed


def with_changes(plan: Plan, chosen: Restart) -> Plan:
    """The same object without any change."""
    return changed_plan(plan, chosen.changes, chosen.why) if chosen.changes else plan


def with_team(plan: Plan, team: Team, why: str) -> Plan:
    """The plan with these ranks. Tokens per step, and the samples of each step, stay the same."""
    elastic = plan["elastic"]
    back = [one for one in elastic["lost"] if one["seat"] in team.back]
    defective = [one["seat"] for one in back if one["cause"] in DEFECTIVE]
    return with_seats(
        plan,
        list(team.seats),
        [*(one for one in elastic["lost"] if one not in back), *team.lost],
        [*elastic["rejoined"], *team.back],
        [*elastic.get("defective", ()), *defective],
        team.size,
        why,
    )


def with_seats(
    plan: Plan,
    used: list[int],
    lost: list[LostRank],
    rejoined: list[int],
    defective: list[int],
    size: int | None,
    why: str,
) -> Plan:
    """The plan with the ranks `used` (planned numbers)."""
    elastic, here, count = plan["elastic"], seats.here(plan), len(used)
    own = [seat - here.start for seat in used if seat in here]
    gpus = [elastic["gpus"][place] for place in own] if elastic["gpus"] else []
    changed = plan | {
        "ranks": count,
        "local_ranks": len(own),
        "gpus": gpus,
        "elastic": {
            **elastic,
            "seats": used,
            "lost": lost,
            "rejoined": rejoined,
            "defective": defective,
        },
    }
    if "numa" in plan and elastic["bindings"]:
        bindings = [elastic["bindings"][place] for place in own]
        changed |= {"numa": {**plan["numa"], "value": bindings}}
    if gpus:
        others = [v for v in plan["variables"] if v["name"] != VISIBLE]
        seen = visible([*gpus, *elastic["gpus"][len(here) :]])
        chosen = env_vars.Variable(VISIBLE, seen, why, env_vars.HERE)
        changed |= {"variables": [*others, chosen.record()]}
    return changed if size is None else _with_batch(plan, changed, size, count, why)


def _with_batch(before: Plan, plan: Plan, size: int, count: int, why: str) -> Plan:
    """`plan` with this micro-batch on `count` ranks. What saves memory stays as the plan `before`
    has decided, but for another reason."""
    config, origins = plan["config"], plan["origins"]
    other = size != config["device_batch_size"]
    if other:
        config = config | {"device_batch_size": size}
        origins = origins | {"device_batch_size": msg("launcher.retry.origin", why=why)}
    split = batch.split(size, plan["batch"]["seq_len"], count, config["total_batch_size"])
    assert split, "sizes and teams are chosen by the divisors"
    plan = plan | {
        "config": config,
        "origins": origins,
        "batch": split.record(),
        "device_batch_size": decisions.Decision(size, why).record(),
        "static_graph": decisions.static_graph(Config(**config), split.accumulation).record(),
    }
    for name in SAVINGS if other else ():
        if name in plan and plan[name]["reason"] != decisions.AS_ASKED:
            kept = msg("launcher.retry.kept", why=why)
            plan[name] = decisions.Decision(plan[name]["value"], kept).record()
    if step := tasks.step_of(plan, size, count):
        plan |= {"memory": {**plan["memory"], **step.record()}}
    text, notes = batch_text.after(before, plan)
    return plan | {"text": text, "notes": notes}


def visible(gpus: list[GpuRecord]) -> str:
    """CUDA_VISIBLE_DEVICES for these GPUs."""
    return ",".join(visible_devices.naming([(gpu["uuid"], gpu["index"]) for gpu in gpus]))


def save(run: rundir.RunDir, plan: Plan) -> None:
    """Write the plan of this machine, on its own disk for its readers too."""
    for path in {run.own_plan} if plan.get("shared", True) else {run.own_plan, run.plan}:
        rundir.write_json(path, plan)


def apply(run: rundir.RunDir, plan: Plan, changed: Plan) -> None:
    """Update the plan, in its files and in place, for ranks that inherit this process's
    environment. Raises OSError, with the plan as it was: the ranks read the file."""
    save(run, changed)
    plan.update(changed)
    if "elastic" in plan:
        set_visible(plan)


def apply_team(run: rundir.RunDir, plan: Plan, team: Team, why: str) -> None:
    apply(run, plan, with_team(plan, team, why))


def set_visible(plan: Plan) -> None:
    """Let the next ranks see the GPUs of the plan: they inherit this process's environment."""
    os.environ.update({v["name"]: v["value"] for v in plan["variables"] if v["name"] == VISIBLE})
