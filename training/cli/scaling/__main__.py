"""Measure weak scaling on this machine: runs with 1, 2, … ranks and the same work
per rank, their throughput against the expected band, and what limits it. Runs
./launch_train.sh in a temporary folder. Takes a minute or two.

Usage: ./duet scaling [CONFIG] [--ranks=1,2] [--steps=40] [--rounds=3] [--json]
                      [--key=value …]

  CONFIG          default: configs/dual_gpu/quickstart.py (for --task=gpt)
  --ranks=1,2     numbers of ranks (default: 1,2, and 4 and 8 with enough GPUs)
  --steps=40      measured steps per run, after 5 steps of warm-up
  --rounds=3      interleaved rounds; medians are shown
  --json          print the figures as JSON
  --key=value     any configuration field, see ./launch_train.sh --help

Exit codes: 0 measured, with any verdict; 2 invalid command line or
configuration; 3 missing resource; 4, 5 a run failed (its card is shown, its
folder is kept); 129, 130, 143 stopped: terminal closed, Ctrl-C, SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from training.cli.scaling import analysis, measure, options, render
from training.cli.scaling.experiment import Experiment, prepare
from training.core import json_text, log
from training.core.errors import Exit, UserError
from training.core.messages import msg
from training.core.project import typed
from training.host import program


class ScalingStopped(BaseException):
    """A stop signal; BaseException, so that no `except Exception` swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = int(Exit.INTERRUPTED) if number == signal.SIGINT else 128 + number


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    for number in measure.STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup, a background job of a script
            signal.signal(number, _stop)
    try:
        chosen = options.parse(argv)
        if chosen.help:
            print(typed(__doc__.rstrip()))
            return int(Exit.DONE)
        return _measure(prepare(chosen, os.environ), chosen.json)
    except UserError as error:
        log.report(error, closing=msg("cli.scaling.nothing_measured"))
        return int(error.code)
    except measure.Failed as failed:
        log.error(str(failed))
        return failed.code
    except ScalingStopped as stopped:
        log.warning(msg("cli.scaling.stopped", signal=stopped))
        return stopped.code


def _stop(number: int, frame: FrameType | None) -> None:
    raise ScalingStopped(number)


def _measure(experiment: Experiment, as_json: bool) -> int:
    for line in render.introduction(experiment):
        log.info(line)
    for warning in experiment.warnings:
        log.warning(warning)
    others = measure.BackgroundLoad()
    rounds, sizes = measure.all_rounds(experiment)
    report = analysis.analyze(rounds, experiment, sizes, others.cores())
    print(json_text.answer(render.record(report)) if as_json else render.text(report))
    return int(Exit.DONE)


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__, needs=("torch", "numpy", "psutil", "tqdm")))
