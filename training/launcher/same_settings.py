"""Settings that must be the same on all machines of a run."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from training import tasks
from training.config.schema import FIELDS, of_the_run
from training.core import redact
from training.core.messages import msg
from training.launcher.hosts.ssh import own_files
from training.launcher.json_socket import Message
from training.launcher.local_ranks import is_script

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

MACHINES, RANKS, SCRIPT = "number of machines", "ranks per machine", "script"  # of a message
_FOLDER = re.compile(r"(^|=)[/~].*", re.DOTALL)  # or file: a machine may have it elsewhere


def facts(plan: Plan) -> Message:
    """Settings that must be the same on every machine, and its code."""
    own = {
        name: value
        for name, value in plan["config"].items()
        if name in FIELDS and of_the_run(name) and name != "run_name"
    }
    script = {}
    if is_script(plan):
        script = {SCRIPT: [_FOLDER.sub(r"\1…", word) for word in plan["script"]["args"]]}
    counts = {MACHINES: plan["place"]["nnodes"], RANKS: plan["local_ranks"]}
    if "precision" in plan:  # decisions that depend on the machine's GPUs; a script makes its own
        own |= {"precision": plan["precision"]["value"], "device": plan["device"]["value"]}
    code = {"torch": plan["torch"], "Duet": f"{plan['duet_version']} ({own_files()[:8]})"}
    return _task_options(plan) | own | script | counts | code


def _task_options(plan: Plan) -> Message:
    """Without folders and files, which a machine may have elsewhere: their content is compared."""
    known = tasks.spec_of(plan).own
    return {
        name: value
        for name, value in tasks.task_of(plan)["options"].items()
        if not (known[name].metadata["unit"] == "path" if name in known else _is_place(value))
    }


def _is_place(value: object) -> bool:
    """Whether this option of a user's task, which has no unit, is a folder or file."""
    return isinstance(value, str) and value.startswith((os.sep, "~"))


def differences(theirs: Message, own: Message, node: int) -> list[str]:
    titles = {MACHINES: msg("launcher.nodes.machines"), RANKS: msg("launcher.nodes.ranks")}
    return [
        msg(
            "launcher.nodes.differs",
            name=titles.get(name, name),
            theirs=_shown(name, theirs),
            node=node,
            own=_shown(name, own),
        )
        for name in sorted({*theirs, *own})
        if theirs.get(name) != own.get(name)
    ]


def _shown(name: str, settings: Message) -> object:
    """A value, as it may be shown on both machines and sent to any program that connects."""
    value = settings.get(name)
    if name == SCRIPT and isinstance(value, list):
        return redact.words(map(str, value))
    return value
