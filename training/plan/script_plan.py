"""The plan of a user script (training/plan/script_request.py): plan.json without a task."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import redact
from training.core.messages import msg
from training.host import decisions, numa, torch_build
from training.host.placement import on_one_machine
from training.host.process import LAUNCHERS
from training.plan import builder, communication, elastic, gpu_use, preflight
from training.plan.script_request import ScriptLaunchRequest
from training.plan.script_words import USED, WATCH

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan


def build(
    request: ScriptLaunchRequest,
    environ: Mapping[str, str],
    test: communication.Test | None = None,
) -> tuple[Plan, list[preflight.Check]]:
    """Like training.plan.training_plan.build, for a script. Raises UserError (exit 3) for failed
    checks."""
    config, local, script = request.config, request.local_ranks, request.runs
    gpu_choice = gpu_use.choose(request, environ, decisions.AS_ASKED)
    machine, environ = gpu_choice.machine, gpu_choice.environ(environ)
    torch = torch_build.installed() if script.python == sys.executable else None
    device = (
        decisions.device(config, local, machine, torch, reason=request.reason("device"))
        if machine.gpus or config.device == "cuda"
        else decisions.Decision("cpu", machine.reason)
    )
    begun, checks = builder.start(request, machine, torch, device, environ)
    gpu_use.use(request, begun, gpu_choice)
    if machine.gpus and device.value != "cuda":
        text = msg("plan.script.too_few_gpus", gpus=len(machine.gpus), ranks=local)
        checks.append(
            preflight.Check(
                "GPUs", preflight.WARNING, text, [request.command_with(len(machine.gpus))]
            )
        )
    facts = preflight.PreflightContext(request, machine, torch, device.value)
    checks += preflight.at_every_start(facts) + (
        preflight.only_in_check(facts) if request.check else []
    )
    checks = preflight.of_ranks(request, checks)
    builder.refuse_errors(request, checks)
    communication.settle(request, begun, checks, environ, test)
    if on_one_machine(begun["place"]) and device.value == "cuda" and not request.watch:
        communication.for_accelerate(begun, machine, script.python)
    plan: Plan = {
        **begun,
        "config_file": None,
        "config": {name: value for name, value in asdict(config).items() if name in USED},
        "script": script.record(),
    }
    if may_lose := elastic.record(plan):
        # a rank may use several GPUs: those without a rank stay visible
        others = [gpu.record() for gpu in machine.gpus[local:]] if plan["gpus"] else []
        plan["elastic"] = {**may_lose, "gpus": [*may_lose["gpus"], *others]}
    if request.watch:
        _leave_alone(plan, script.path)
    plan["notes"] += [
        *builder.warnings(checks),
        *elastic.note(plan),
        *_starts_ranks(request, environ),
    ]
    own = (
        []
        if request.watch
        else [
            msg("plan.script.python", python=script.python, reason=script.python_reason)
            if script.python
            else msg("plan.script.program"),
            msg("plan.script.device", value=device.value, reason=device.reason)
            if config.device == "auto"
            else msg("plan.text.device", value=device.value, reason=device.reason),
        ]
    )
    plan["headline"] += [*own, *elastic.sentence(plan)]
    plan["text"] += [
        msg("plan.script.command", command=shlex.join([script.path, *redact.words(script.args)])),
        *own,
        *elastic.sentence(plan),
    ]
    return plan, checks


def _starts_ranks(request: ScriptLaunchRequest, environ: Mapping[str, str]) -> list[str]:
    """A note on a program that is a launcher itself: its ranks would not be watched."""
    script = request.runs
    name = script.path if script.module else Path(script.path).name
    if request.watch or name not in LAUNCHERS:
        return []
    on_path = shutil.which(name, path=environ.get("PATH")) == script.path
    words = ["python", "-m", name] if script.module else [name if on_path else script.path]
    command = f"./duet watch -- {redact.joined([*words, *script.args])}"
    return [msg("plan.script.is_launcher", name=name, command=command)]


def _leave_alone(plan: Plan, command: str) -> None:
    """A watched command starts its ranks in the environment of the user's shell."""
    reason = msg("plan.watch.reason")
    plan["launcher"] = {"value": WATCH, "reason": reason}
    plan["numa"] = numa.NumaPlan((None,), memory=False, reason=reason).record()
    plan["variables"] = []
    sentence = msg("plan.watch.sentence", command=command)
    plan["headline"], plan["text"] = [sentence], [sentence]
