"""The plan for somebody's own script (training/script.py): the same file as any plan, with what is known of a script."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from training.communication import verdicts
from training.errors import Exit, UserError
from training.host import decide, gpus, preflight, torch_build, variables
from training.launch.place import LOCAL
from training.script import USED, ScriptLaunch


def build(request: ScriptLaunch, environ: Mapping[str, str], schema_version: int) -> tuple[dict[str, Any], list[preflight.Check]]:
    """As training.plan.build, for what is known of a script. Raises UserError (exit 3) when the machine can not do it."""
    config, place, ranks, local, script = request.config, request.place, request.ranks, request.local_ranks, request.runs
    machine = gpus.look(environ) if config.device != "cpu" else gpus.Machine((), "not asked")
    torch = torch_build.installed() if script.python == sys.executable else None
    device = decide.device(config, local, machine, torch) if machine.gpus else decide.Choice("cpu", machine.reason)
    if config.device == "cuda":
        device = decide.Choice("cuda", "as asked")
    port, port_check = preflight.port(config.master_port) if place.kind == LOCAL else (place.master_port, None)
    checks = [port_check] if port_check else []
    if machine.gpus and device.value != "cuda":
        text = f"{len(machine.gpus)} GPUs for {local} ranks: whether the script trains on the CPU then is up to it"
        checks.append(preflight.Check("GPUs", preflight.WARNING, text, [request.command_with(len(machine.gpus))]))
    facts = preflight.Facts(request, machine, torch, device.value)
    checks += preflight.at_every_start(facts) + (preflight.only_in_check(facts) if request.check else [])
    problems = [c.problem() for c in checks if c.status == preflight.ERROR]
    if problems and not (request.dry_run or request.check):
        raise UserError(problems, Exit.RESOURCES)
    chosen = variables.choose(
        environ, device=device.value, ranks=ranks, local_ranks=local, debug=config.debug, meeting=place.master_addr, libuv=config.libuv
    )
    used = machine.gpus[:local] if device.value == "cuda" else ()
    chosen += verdicts.variables([g.uuid for g in used], machine.driver, torch.version if torch else None, environ)
    launcher = decide.launcher(config, place, request.script, ranks)
    here = f", {local} of them on this machine" if local != ranks else ""
    words = shlex.join([script.path, *script.args])
    return {
        "schema_version": schema_version,
        "created": time.time(),
        "launch": secrets.token_hex(8),
        "torch": torch.version if torch else None,
        "command": {"script": request.script, "args": request.args, "cwd": os.getcwd()},
        "config_file": None,
        "config": {name: value for name, value in asdict(config).items() if name in (*USED, "hang_timeout", "retries")},
        "origins": request.origins,
        "script": asdict(script),
        "place": place.record(),
        "ranks": ranks,
        "local_ranks": local,
        "launcher": launcher.record(),
        "device": device.record(),
        "gpus": [g.record() for g in used],
        "driver": machine.driver,
        "variables": [v.record() for v in chosen],
        "master_port": port,
        "resume": False,
        "notes": [*request.notes, *decide.left_over(place), *variables.useless(environ)]
        + [f"{c.name}: {c.text}" for c in checks if c.status == preflight.WARNING],
        "text": [
            place.sentence(),
            f"{ranks} rank{'s' if ranks > 1 else ''}{here} by {launcher.value}: {launcher.reason}",
            f"script: {words}",
            f"python: {script.python}, {script.python_reason}" if script.python else "a program: executed directly",
            f"device {device.value}: {device.reason}" + ("; the script decides" if config.device == "auto" else ""),
        ],
    }, checks
