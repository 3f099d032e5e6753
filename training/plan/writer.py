"""Writes the run directory of a plan, and withdraws it when the plan is refused later."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from training.core import file_lock, rundir, standing
from training.core import log as console
from training.core.errors import Exit, Problem, UserError, unwritable
from training.core.messages import msg
from training.core.project import ROOT
from training.host.placement import Topology
from training.plan import preflight, resume_run, run_name
from training.plan.request import LaunchRequest

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan

# plan, seconds → name, launch id and token of the run of the machine that coordinates
# (training.launcher.rendezvous)
Ask = Callable[["Plan", float], tuple[str, str, str]]
# plan, folder of the runs → the role of this machine in a run that continues without it
Find = Callable[["Plan", Path], Topology | None]


def write(
    plan: Plan,
    checks: list[preflight.Check],
    request: LaunchRequest,
    ask: Ask,
    starter: int,
    find: Find = lambda *_: None,
    begins: Callable[[], None] = lambda: None,
) -> rundir.RunDir:
    """Create the run directory and the log file, and write the plan. A machine that does not
    coordinate uses the run of the one that does, whose name `ask` requests. `starter`: PID of the
    process that becomes the supervisor. `begins` is called when there is nothing to wait for any
    more. Raises UserError when that machine does not answer, or the disk refuses a file; a new run
    is removed then."""
    place = find(plan, request.experiments) or request.place
    plan["place"] = place.record()
    if place.leads:
        begins()
        run = request.resume_from or new_run(request)
    else:
        run, token = _common_run(plan, request, ask)
        begins()
        plan["shared"] = run.token(token).exists()
        if not (plan["shared"] or plan.get("script")):
            plan["text"].append(msg("plan.nodes.own_disk"))
        if not (plan["shared"] or plan["resume"]):
            _unless_taken(run, plan, request)
    try:
        _fill(run, plan, request, place, checks, starter)
    except OSError as error:
        with contextlib.suppress(OSError):
            _undo(run, plan)
        raise _refused(error, run.path) from error
    if run.own == run.path and request.place.nnodes > 1:
        run.remove_tokens()  # of a killed launch
        run.token(plan["launch"]).touch()
    return run


def _fill(
    run: rundir.RunDir,
    plan: Plan,
    request: LaunchRequest,
    place: Topology,
    checks: list[preflight.Check],
    starter: int,
) -> None:
    run.create()
    with file_lock.held(run.path):
        if place.leads:
            _unless_begun(run, request)
        keeps = request.resume_from if place.leads else not plan["shared"]
        if keeps:
            _keep_before(run)
        plan |= {"run_name": run.name, "run_dir": str(run.path), "log_file": str(_new_log(request))}
        if ROOT.parent == run.path.resolve():  # frozen for a SLURM job
            plan["submission"] = ROOT.name
        plan["starter"] = {**standing.identity(starter), "started": time.time()}
        _write_files(run, plan, place, checks)
        if keeps:
            run.data.unlink(missing_ok=True)  # ranks of another launcher must not read old data


def _unless_begun(run: rundir.RunDir, request: LaunchRequest) -> None:
    """Raises UserError if another process has taken the run since this plan was made."""
    if not request.resume_from:
        if run.plan.exists():
            raise UserError(_taken(request))
        return
    checked = preflight.not_running(run, waits=False, launch=request.launch_before)
    if wrong := [c.problem() for c in checked if c.status == preflight.ERROR]:
        raise UserError(wrong, Exit.RESOURCES)


def _refused(error: OSError, folder: Path) -> UserError:
    """`folder`: if the error names no file."""
    place = Path(error.filename).parent if isinstance(error.filename, str) else folder
    return unwritable(place, error, Exit.RESOURCES)


def _undo(run: rundir.RunDir, plan: Plan) -> None:
    """After an error of the disk. A resumed run has kept its plan and data."""
    if plan.get("log_file"):
        Path(plan["log_file"]).unlink(missing_ok=True)
    taken = (rundir.read_json(run.plan) or plan).get("launch") != plan["launch"]
    if not (plan["resume"] or taken):
        withdraw(run)


def _write_files(
    run: rundir.RunDir, plan: Plan, place: Topology, checks: list[preflight.Check]
) -> None:
    """The plan last: with it the run is taken."""
    rundir.write_json(run.preflight, {"checks": [c.record() for c in checks]})
    set_here = {v["name"]: v["value"] for v in plan["variables"] if v["origin"] == "set here"}
    set_here |= {rundir.VARIABLE: str(run.path), console.LOG_VARIABLE: plan["log_file"]}
    node = [] if place.leads else [f"--node={place.node_rank}"]
    module = [str(ROOT / "lib/run_module.py"), "training.cli.supervise"]
    rundir.write_words(run.argv, [sys.executable, *module, str(run.path), *node])
    rundir.write_words(run.env, [f"{name}={value}" for name, value in set_here.items()])
    rundir.write_json(run.own_plan, plan)
    if run.own != run.path and not plan["shared"]:
        rundir.write_json(run.plan, plan)


def _common_run(plan: Plan, request: LaunchRequest, ask: Ask) -> tuple[rundir.RunDir, str]:
    """(run, token)."""
    name, plan["launch"], token = ask(plan, request.config.rendezvous_timeout)
    if request.resume_from and request.resume_from.name != name:
        raise UserError(resume_run.other_run(name, request.resume_from.name, request.command))
    return rundir.RunDir(request.experiments / name, request.place.node_rank), token


def _unless_taken(run: rundir.RunDir, plan: Plan, request: LaunchRequest) -> None:
    """Raises UserError if this machine's disk has another run of that name. One that continues
    without this machine has the same launch."""
    there = rundir.read_json(run.plan)
    if there and there.get("launch") != plan["launch"]:
        config = replace(request.config, run_name=run.name)
        args = config, request.origins, request.experiments, request.command
        raise UserError(run_name.taken(*args, resumable=False))


def become_launcher(run: rundir.RunDir, environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by the supervisor of the ranks, as lib/run.sh does."""
    command, variables = (path.read_bytes().split(b"\0")[:-1] for path in (run.argv, run.env))
    os.execve(
        command[0],
        command,
        {os.fsencode(k): os.fsencode(v) for k, v in environ.items()}
        | dict(v.split(b"=", 1) for v in variables),
    )


def _keep_before(run: rundir.RunDir) -> None:
    """Keep the plan and data of a resumed run: restored when this start ends before its first
    step."""
    # otherwise the previous start ended before its first step, and its predecessor's files are kept
    if standing.plan_file(run) == run.plan:
        # the plan last: it marks the copy as complete
        for old, kept in (
            (run.data, run.data_before),
            (run.plan, run.plan_before),
        ):
            if old.exists():
                facts = old.stat()
                # complete after a power failure too
                rundir.write_bytes(kept, old.read_bytes(), stat.S_IMODE(facts.st_mode))
                os.utime(kept, ns=(facts.st_atime_ns, facts.st_mtime_ns))
            else:
                kept.unlink(missing_ok=True)


def withdraw(run: rundir.RunDir) -> Path | None:
    """Undo a start that was refused or stopped before its first step: remove a new run, restore a
    resumed one. Returns the folder that was removed; None: it is of an earlier start too."""
    if run.own == run.path:
        if give_back(run):
            return None
        _remove(run.path)
        return run.path
    own_disk = not (rundir.read_json(run.own_plan) or {}).get("shared", True)
    restored = own_disk and give_back(run)
    if own_disk and not restored:
        _remove_files(run.plan, run.data)
        if not any(run.checkpoints.iterdir()):
            _remove(run.tokenizer)
        for folder in (run.heartbeats, run.ranks, run.checkpoints):
            _remove_empty(folder)
    # the rest of its part is of earlier starts
    _remove_files(run.own_plan, run.preflight, run.argv, run.env, run.supervisor)
    _remove(run.received)
    _remove_empty(run.own)
    if own_disk:
        _remove_empty(run.path)
    if restored:
        return None
    return next((folder for folder in (run.path, run.own) if not folder.exists()), None)


def _remove_files(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # or another machine has removed it
        folder.rmdir()


def _remove(folder: Path) -> None:
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError as error:
            # another machine, which was stopped too, removes or writes its part of it
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise


def give_back(run: rundir.RunDir) -> bool:
    """Restore a resumed run to its state before this start; False for a new run."""
    if rundir.read_json(run.plan_before) is None:  # or cut by a power failure
        return False
    run.data.unlink(missing_ok=True)
    if run.data_before.exists():
        run.data_before.replace(run.data)
    run.plan_before.replace(run.plan)
    return True


def new_run(request: LaunchRequest) -> rundir.RunDir:
    """Raises UserError if the requested name is taken, or the folder cannot be made."""
    try:
        return _new_folder(request)
    except OSError as error:
        raise _refused(error, request.experiments) from error


def _new_folder(request: LaunchRequest) -> rundir.RunDir:
    wanted = request.config.run_name
    request.experiments.mkdir(parents=True, exist_ok=True)
    while wanted:
        run = rundir.RunDir(request.experiments / wanted)
        try:
            run.path.mkdir()
        except FileExistsError:
            if problems := _taken(request):
                raise UserError(problems) from None
            if not run_name.is_remains(run):  # the other launch has just withdrawn it
                continue
        return run
    base = f"{request.base_name}_{time.strftime('%Y%m%d_%H%M%S')}"
    for attempt in range(1, 1000):
        path = request.experiments / (base if attempt == 1 else f"{base}_{attempt}")
        try:
            path.mkdir()
        except FileExistsError:  # two runs within one second
            continue
        return rundir.RunDir(path)
    raise FileExistsError(f"{request.experiments}/{base}_1000")


def _taken(request: LaunchRequest) -> list[Problem]:
    return run_name.taken(request.config, request.origins, request.experiments, request.command)


def _new_log(request: LaunchRequest) -> Path:
    request.logs.mkdir(parents=True, exist_ok=True)
    base = f"{Path(request.script).stem.replace(' ', '_')}_{time.strftime('%Y%m%d_%H%M%S')}"
    for attempt in range(1, 1000):
        path = request.logs / (f"{base}.log" if attempt == 1 else f"{base}_{attempt}.log")
        try:
            path.open("x").close()
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"{request.logs}/{base}_1000.log")
