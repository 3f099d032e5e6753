"""Makes the plan for the launch scripts.

    python lib/run_module.py training.cli.plan SCRIPT [ARGS…]

Prints the run directory, which contains the command and variables for the shell. Errors go to
standard error with exit 2 (configuration) or 3 (machine); nothing is written then. With --dry_run
it prints the plan instead. If this process is already a rank of another launcher, it prints 'rank':
train.py then makes the plan together with the other ranks. With --hosts it prints 'hosts':
training.cli.hosts then starts this command on every machine.

    python lib/run_module.py training.cli.plan --before-install SCRIPT [ARGS…]

With any Python: reports what needs no packages (errors, --dry_run), and prints nothing if the
packages have to be installed first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from training.cli import doctor
from training.config import flags
from training.core import log, rundir
from training.core.errors import Exit, NothingToDo, UserError
from training.core.messages import msg
from training.core.project import PROBLEMS, typed
from training.host import hosts, process
from training.host import program as command
from training.host.placement import RANK
from training.launcher import continued_run, rendezvous, resumed_run, stop_signals
from training.launcher.communication.start_test import StartTest
from training.launcher.hosts import plan_text
from training.plan import preflight, script_plan, script_words, writer
from training.plan import script_request as own_script
from training.plan.option_help import option_lines
from training.plan.preflight import torch_wheels
from training.plan.request import LaunchRequest, read
from training.plan.roles import launcher_options
from training.plan.training_plan import build, describe

if TYPE_CHECKING:
    from training.core.contracts.plan import Plan
    from training.launcher.communication.result import CommunicationResult

BEFORE_INSTALL = "--before-install"


def show(
    request: LaunchRequest,
    plan: Plan,
    checks: list[preflight.Check],
    tested: CommunicationResult | None = None,
) -> int:
    """Print the output of `--dry_run`, `--explain` and `--check`; returns the exit code."""
    asked = launcher_options(request.config)
    several = request.place.source == hosts.HEAD
    if several and request.check:  # before the next line: an ssh that fails must not end this
        of_script = script_words.asked_for(request.args)
        checks = [*checks, *plan_text.checked(asked, os.environ, of_script=of_script)]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # quiet under `… | head`
    if not request.check:
        print(describe(plan, checks, saved=request.save_config))
        if several:
            print(plan_text.described(asked))
        return int(Exit.RESOURCES if preflight.worst(checks) == preflight.ERROR else Exit.DONE)
    report = doctor.run(request, plan, checks, tested)
    if request.json:
        print(report.json())
    else:
        print(f"{describe(plan, report.checks, checked=True)}\n{report.text()}")
    return int(report.code)


def answer_refused(line: flags.CommandLine, error: UserError) -> None:
    """The answer of `--check --json` to a request with errors, which the log has too."""
    if line.on("check") and line.on("json") and not error.said_by_another:
        print(doctor.refused(error))


def main() -> int:
    installed = BEFORE_INSTALL not in sys.argv[1:2]
    if not installed:
        del sys.argv[1]
    line = flags.parse(script_words.split(sys.argv[2:])[0])
    # --help=true; the scripts handle --help themselves
    if line.on("help"):
        print("\n".join(option_lines()))
        return 0
    if line.flags.get("inject", ("",))[0] == "list":
        from training.config import fault_spec

        print(fault_spec.overview())
        return 0
    received = resumed_run.Received(installed=installed)
    try:
        command.require_folder()
        if script_words.asked_for(sys.argv[2:]):
            return _script(sys.argv[1], sys.argv[2:], os.environ, installed)
        request = read(sys.argv[1], sys.argv[2:], os.environ, installed, received=received)
        if request.place.kind == RANK:
            if installed:
                print(RANK)
            return 0
        if request.save_config:
            request.save()
            if not (request.dry_run or request.check):
                return int(Exit.DONE)
        if _starts_machines(request):
            return 0
        request.starter = _starter(request)
        test = StartTest(only_check=request.check)
        return _hand_out(request, *build(request, os.environ, _test(request, test)), test)
    except NothingToDo as done:
        log.success(typed(str(done)))
        return int(Exit.DONE)
    except resumed_run.NotInstalled:
        return 0
    except KeyboardInterrupt as asked:
        received.withdraw()
        return stopped(asked)
    except UserError as error:
        received.withdraw()
        log.report(error)
        answer_refused(line, error)
        _leave_codes(error)
        return int(error.code)


def stopped(asked: KeyboardInterrupt) -> int:
    """Report a stop signal before anything was started; returns the exit code."""
    number = stop_signals.number_of(asked)
    code, text = stop_signals.code(number), stop_signals.before_start(number)
    log.warning(msg("launcher.end.exit", text=text, code=int(code)))
    return int(code)


def _leave_codes(error: UserError) -> None:
    """For the sweep that has started this run. A full disk may be the problem."""
    if file := os.environ.get(PROBLEMS):
        codes = "".join(f"{problem.code}\n" for problem in error.problems)
        with contextlib.suppress(OSError):
            rundir.write_bytes(Path(file), codes.encode())


def _script(program: str, args: list[str], environ: Mapping[str, str], installed: bool) -> int:
    request = own_script.read(program, args, environ)
    request.installed = installed
    if _starts_machines(request):
        return 0
    request.starter = _starter(request)
    test = StartTest(only_check=request.check)
    return _hand_out(request, *script_plan.build(request, environ, _test(request, test)), test)


def _starts_machines(request: LaunchRequest) -> bool:
    """Whether this command starts several machines; then nothing is launched here."""
    if request.place.source != hosts.HEAD or request.dry_run or request.check:
        return False
    if request.installed:
        print(hosts.HEAD)
    return True


def _starter(request: LaunchRequest) -> int:
    """PID of the launch script, if it is to start something."""
    starts = request.installed and not (request.dry_run or request.check)
    return os.getppid() if starts else 0


def _test(request: LaunchRequest, test: StartTest) -> StartTest | None:
    return test if request.installed else None  # the ranks of a test need the packages


def _hand_out(
    request: LaunchRequest, plan: Plan, checks: list[preflight.Check], test: StartTest
) -> int:
    """The run directory for the shell, or the plan for the user."""
    if not request.installed:  # everything else needs the packages
        for check in checks:
            if check.name == torch_wheels.NAME:
                log.warning("\n".join([check.text, *(f"    {fix}" for fix in check.fixes)]))
        return show(request, plan, checks) if request.dry_run and not request.check else 0
    if request.dry_run or request.check:
        return show(request, plan, checks, test.result)
    find = partial(continued_run.of_plan, resumed=request.resume_from)
    # From the first file on the launch script answers stop signals: it has the supervisor withdraw
    # the run.
    begins = process.ignore_stop_signals
    run = writer.write(plan, checks, request, ask, request.starter, find, begins)
    try:
        command.answer(run.own)
    except BrokenPipeError:
        # the launch script was killed: the plan will not be started
        writer.withdraw(run)
        command.discard_output()
        return int(Exit.INTERRUPTED)
    return 0


def ask(plan: Plan, seconds: float) -> tuple[str, str, str]:
    """rendezvous.ask, which may last as long as --rendezvous_timeout."""
    with process.stoppable():
        return rendezvous.ask(plan, seconds)


if __name__ == "__main__":
    sys.exit(command.run(lambda _: main(), __doc__, internal=True, pipe=False))
