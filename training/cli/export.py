"""Write a trained model as a folder for other programs, with its tokenizer and a
model card.

Usage: ./duet export [RUN] --out=DIR [--format=safetensors]

  RUN                   a run directory, the name of a run, latest (default), a
                        checkpoint folder, or a folder of ./duet export;
                        RUN/best: its checkpoint with the best evaluation
  --out=DIR             a new or empty folder
  --format=safetensors  model.safetensors; torch: model.pt for torch.load();
                        hf: for Hugging Face's AutoModelForCausalLM and
                        AutoTokenizer (language models)
  --weights=ema         the moving average of --ema, the default where there is
                        one; raw: the weights as trained
  --quiet               do not print the folder

The folder appears complete or not at all. Its README.md has the data, the
losses and the command of the training; the licence is left for you to fill in.
"""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from training import tasks
from training.cli import weights_argument
from training.core import args, find_run
from training.core.errors import Exit, Problem, UserError
from training.core.find_run import path_of
from training.core.messages import msg
from training.core.project import typed
from training.host import program
from training.tasks import safetensors_file
from training.tasks.weights import FORMATS, HUB, TORCH_FORM, Weights

COMMAND = "./duet export"
NEW = "model/"  # suggested folder
FLAGS = {
    "out": args.TEXT,
    "format": args.one_of(*FORMATS),
    "quiet": args.SWITCH,
    "weights": weights_argument.KIND,
    "help": args.SWITCH,
}


@dataclass
class ExportOptions:
    """A checked command line."""

    weights: Weights | None = None
    out: Path = Path()
    form: str = FORMATS[0]
    quiet: bool = False
    help: bool = False


def parse(argv: list[str]) -> ExportOptions:
    """Raises UserError with all problems at once."""
    line = args.parse(argv, FLAGS, COMMAND)
    values, problems = line.values, line.problems
    if "help" in values:
        return ExportOptions(help=True)
    form = values.get("format") or FORMATS[0]
    found = weights_argument.one(line.words, line, problems, {"out": NEW})
    if found and form == HUB and not tasks.spec_of(found.plan).writes_text:
        name = tasks.task_of(found.plan)["name"]
        problems.append(
            Problem(
                "task.unsupported",
                msg("cli.export.no_hub", task=name),
                ", ".join(one for one in FORMATS if one != HUB),
                [line.again(format=FORMATS[0], **_out(line))],
            )
        )
    if form != TORCH_FORM:
        problems += safetensors_file.lacking()
    out = Path(os.path.realpath(path_of(values["out"]))) if values.get("out") else Path()
    if "out" not in values:
        problems.append(
            Problem(
                "flag.no_value",
                msg("cli.export.no_out"),
                msg("cli.export.out_wanted"),
                [line.again(**_out(line))],
                "out",
            )
        )
    elif values["out"]:
        problems += _not_writable(out, line)
    if problems:
        lacks = all(problem.code == "package.missing" for problem in problems)
        raise UserError(problems, Exit.RESOURCES if lacks else Exit.CONFIG)
    return ExportOptions(found, out, form, "quiet" in values)


def _out(line: args.Args) -> dict[str, str]:
    """A new folder, if none was given."""
    return {} if "out" in line.written else {"out": NEW}


def _not_writable(out: Path, line: args.Args) -> list[Problem]:
    allowed = msg("cli.export.out_wanted")
    if find_run.is_folder(out) and os.access(out, os.R_OK) and not any(out.iterdir()):
        return []
    if os.path.lexists(out):
        free = next(
            place
            for n in itertools.count(2)
            if not find_run.exists(place := out.parent / f"{out.name or 'model'}_{n}")
        )
        fixes = [line.again(out=str(free))]
        return [Problem("output.not_empty", msg("cli.export.not_empty", out=out), allowed, fixes)]
    if not find_run.is_folder(out.parent):
        fixes = [f"mkdir -p {shlex.quote(str(out.parent))}"]
        what = msg("monitor.report.options.no_folder", folder=str(out.parent))
        return [Problem("output.no_folder", what, allowed, fixes)]
    return []


def main(argv: list[str]) -> int:
    chosen = parse(argv)
    if chosen.help:
        print(typed((__doc__ or "").strip()))
        return int(Exit.DONE)
    assert chosen.weights
    program.require(("torch", "numpy"))
    from training.tasks import export, trained

    model = trained.load(tasks.spec_of(chosen.weights.plan), chosen.weights)
    try:
        export.write(model, chosen.form, chosen.out)
    except OSError as error:
        raise UserError(
            Problem(
                "output.unwritable",
                msg("cli.report.unwritable", out=chosen.out, error=error.strerror or error),
                msg("cli.export.out_wanted"),
                [f"{COMMAND} … --out=DIR"],
            ),
            Exit.RESOURCES,
        ) from None
    if not chosen.quiet:
        print(chosen.out)
    return int(Exit.DONE)


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__, pages=True))
