"""Measure trained models on any data, side by side.

Usage: ./duet evaluate [RUN…] --data=PATH [--checkpoints=all] [--out=FILE]
                       [--json]

  RUN                a run directory, the name of a run, latest (default), a
                     checkpoint folder, or a folder of ./duet export;
                     RUN/best: its checkpoint with the best evaluation; several
                     are compared
  --data=PATH        language models: any text file, or a folder, in every
                     format of a training (.txt, .jsonl, .parquet, .gz, .zst),
                     or stdlib; video restoration: frames in the GoPro layout,
                     default: the validation frames of the run; other tasks:
                     none, they measure their own validation data
  --checkpoints=newest
                     of each run; all: every checkpoint, to see the scores over
                     the steps
  --out=FILE         also write an HTML page: scores, curves, clips with
                     pictures, the passages of the highest and the lowest loss
  --text_field=NAME  key or column of the text in .jsonl and .parquet
  --encoding=NAME    of text files that are not UTF-8
  --device=auto      cuda if a GPU is free; cpu
  --weights=ema      the moving average of --ema, the default where there is
                     one; raw: the weights as trained
  --json             print one JSON object

Language models: loss in nats per token, bits per byte (comparable between
tokenizers) and perplexity per token.
"""

from __future__ import annotations

import errno
import math
import os
import shlex
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from training import tasks
from training.cli import spare_gpu, weights_argument
from training.core import args, find_run, json_text, log, rundir, units
from training.core.cells import cells, pad
from training.core.errors import Exit, Problem, UserError
from training.core.find_run import LATEST, path_of
from training.core.messages import msg
from training.core.plain_text import one_line
from training.core.project import typed
from training.host import process, program
from training.tasks.evaluation import SIZES, Evaluation, Part
from training.tasks.weights import RAW, Weights, title

if TYPE_CHECKING:
    from training.tasks.trained import Trained

COMMAND = "./duet evaluate"
FLAGS = {
    "data": args.TEXT,
    "text_field": args.TEXT,
    "encoding": args.TEXT,
    "checkpoints": args.one_of("newest", "all"),
    "out": args.TEXT,
    "device": args.one_of(*weights_argument.DEVICES),
    "json": args.SWITCH,
    "weights": weights_argument.KIND,
    "help": args.SWITCH,
}
EVERY_S = 0.5  # progress
NAMED = 3  # models in a message
WHOLE = 1e15  # larger numbers are always integers in float64


@dataclass
class EvaluateOptions:
    """A checked command line; the plans of `weights` have the data."""

    weights: list[Weights] = field(default_factory=list)
    device: str = "auto"
    data: str = ""
    out: Path | None = None
    json: bool = False
    help: bool = False
    line: args.Args = field(default_factory=args.Args)


def parse(argv: list[str]) -> EvaluateOptions:
    """Raises UserError with all problems at once."""
    line = args.parse(argv, FLAGS, COMMAND)
    values, problems = line.values, line.problems
    if "help" in values:
        return EvaluateOptions(help=True)
    given = {n: values[n] for n in ("data", "text_field", "encoding") if values.get(n)}
    chosen = []
    for word in line.words or [LATEST]:
        others = shlex.join(one for one in line.words if one != word)
        found = weights_argument.find(word, line, problems, before=others)
        if found and not any(p.field == "data" for p in problems):
            plan, wrong = tasks.spec_of(found.plan).aim(found.plan, given)
            problems += [p for p in wrong if p not in problems]
            newest = found.planned(plan)
            if values.get("checkpoints") == "all":
                chosen += [*newest.earlier[::-1], replace(newest, earlier=())]
            else:
                chosen.append(newest)
    # RUN and RUN/best may be the same checkpoint
    chosen = list({(one.file, one.averaged): one for one in chosen}.values())
    out = path_of(values["out"]).absolute() if values.get("out") else None
    problems += _not_writable(out, line) if out else []
    if problems:
        denied = all(problem.code == "output.unwritable" for problem in problems)
        problems = line.completed(problems, FLAGS)
        raise UserError(problems, Exit.RESOURCES if denied else Exit.CONFIG)
    return EvaluateOptions(
        chosen,
        values.get("device", "auto"),
        given.get("data", ""),
        out,
        "json" in values,
        line=line,
    )


def _not_writable(out: Path, line: args.Args) -> list[Problem]:
    allowed = msg("cli.evaluate.out_allowed")
    if out.suffix not in (".html", ".htm"):
        fixes = [line.again(out=str(out.with_suffix(".html")))]
        return [Problem("output.suffix", msg("cli.evaluate.out_suffix", out=out), allowed, fixes)]
    if find_run.is_folder(out):
        what = msg("monitor.report.options.out_is_folder", out=str(out))
        return [Problem("output.is_folder", what, allowed)]
    if not find_run.is_folder(out.parent):
        what = msg("monitor.report.options.no_folder", folder=str(out.parent))
        fixes = [f"mkdir -p {shlex.quote(str(out.parent))}"]
        return [Problem("output.no_folder", what, allowed, fixes)]
    if not os.access(out.parent, os.W_OK):  # before hours of measuring
        return [_unwritable(out, os.strerror(errno.EACCES))]
    return []


def _unwritable(out: Path, error: str | None) -> Problem:
    what = msg("cli.report.unwritable", out=out, error=error)
    return Problem("output.unwritable", what, msg("config.saved.writable_file"))


def main(argv: list[str]) -> int:
    chosen = parse(argv)
    if chosen.help:
        print(typed((__doc__ or "").strip()))
        return int(Exit.DONE)
    program.require(("torch", "numpy"))
    chosen.device = spare_gpu.choose(chosen.device)
    done: list[Evaluation] = []
    failed: list[UserError] = []
    device = ""
    try:
        for weights in chosen.weights:
            try:
                device = _measure(weights, chosen, done)
            except UserError as error:  # the others are measured
                # A copy, since the frames of the error keep the model in memory.
                failed.append(UserError(error.problems, error.code))
    except BaseException:  # Ctrl-C, or a defect, after what may have been hours
        if done:
            _answer(chosen, done, device)
        raise
    failed += _answer(chosen, done, device)
    if done and chosen.line.values.get("checkpoints") == "all":
        failed = _without_deleted(failed)
    if failed:
        problems = [p for error in failed for p in error.problems]
        problems = chosen.line.completed(problems, FLAGS)
        wrong = UserError(problems, failed[0].code)
        total = len(chosen.weights)
        log.report(wrong, closing=msg("cli.evaluate.measured", count=len(done), total=total))
        return int(wrong.code)
    if chosen.out and not chosen.json:
        print(chosen.out)
    return int(Exit.DONE)


def _without_deleted(failed: list[UserError]) -> list[UserError]:
    """A training may delete checkpoints while earlier ones are measured."""
    deleted = [error for error in failed if error.problems[0].code == "weights.deleted"]
    for error in deleted:
        log.warning(str(error))
    return [error for error in failed if error not in deleted]


def _measure(weights: Weights, chosen: EvaluateOptions, done: list[Evaluation]) -> str:
    """Adds the scores of a model to `done`. Returns the device. Raises UserError."""
    from training.tasks import trained

    spec = tasks.spec_of(weights.plan)
    model = trained.load(spec, weights, chosen.device)
    measured = partial(_measured, pictured=chosen.out is not None)
    model, found = trained.using(spec, model, chosen.device, measured)
    done.append(found)
    _forget_pictures(done)
    return str(model.device)


def _answer(chosen: EvaluateOptions, done: list[Evaluation], device: str) -> list[UserError]:
    """Prints the scores and writes the page; why it cannot be written."""
    rows = [_row(one) for one in done]
    if chosen.json:
        print(json_text.answer({"evaluations": rows}))
    elif done:
        print("\n".join(_table(rows)))
    if broken := _not_finite(done):
        log.warning(broken)
    try:
        if chosen.out and done:
            _write(chosen.out, done, chosen.data, device)
    except UserError as error:
        return [error]
    return []


def _row(one: Evaluation) -> dict[str, object]:
    """A score with the name of another column has that of tracking."""
    row = {"run": one.run, "step": one.step, "weights": one.weights, "file": one.file}
    scores = {f"val_{n}" if n in row else n: value for n, value in one.scores.items()}
    return {**row, **scores}


def _write(out: Path, done: list[Evaluation], data: str, device: str) -> None:
    """The page. Raises UserError."""
    from training.monitor.report import evaluation_page

    shown = data or msg("cli.evaluate.own_data")
    page = evaluation_page.page(done, shown, device, time.time())
    try:
        rundir.write_output(out, page.html().encode("utf-8", "replace"))
    except OSError as error:
        raise UserError(_unwritable(out, error.strerror), Exit.RESOURCES) from None


def _forget_pictures(done: list[Evaluation]) -> None:
    """Those that the page will not show: of hundreds of checkpoints they would take gigabytes."""
    if not any(part.pictures for part in done[-1].parts):
        return
    from training.monitor.report import evaluation_page

    shown = {id(one) for one in evaluation_page.pictured(done)}
    for one in done:
        if id(one) not in shown:
            for part in one.parts:
                part.pictures.clear()


def _measured(model: Trained, *, pictured: bool) -> Evaluation:
    shown = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal shown
        if sys.stderr.isatty() and time.monotonic() - shown > EVERY_S:
            shown = time.monotonic()
            print(
                f"\r{one_line(model.weights.title)}: {100 * done // max(1, total)} %  ",
                end="",
                file=sys.stderr,
            )

    parts: list[Part] = []
    try:
        scores = model.evaluate(progress, parts if pictured else None)
    finally:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    weights = model.weights
    folder = weights.run.path if weights.run else weights.file.parent
    return Evaluation(
        weights.name, weights.step, weights.kind, str(folder), str(weights.file), scores, parts
    )


def _not_finite(done: list[Evaluation]) -> str | None:
    """What a NaN means, or an infinite loss. Other scores may be infinite: the PSNR of a perfect
    picture, the perplexity of a large loss."""
    found = [
        (one, name, value)
        for one in done
        for name, value in one.scores.items()
        if math.isnan(value) or (math.isinf(value) and name == "loss")
    ]
    if not found:
        return None
    models = list(dict.fromkeys(title(one.run, one.step, one.weights) for one, _, _ in found))
    named = "; ".join(models[:NAMED]) + ("; …" if len(models) > NAMED else "")
    _, name, value = found[0]
    return msg("cli.evaluate.not_finite", name=name, value=value, models=named)


def _table(rows: list[dict[str, object]]) -> list[str]:
    """A line for each model; the columns are the scores of all."""
    averaged = any(row["weights"] != RAW for row in rows)
    left_out = ("file",) if averaged else ("file", "weights")
    names = list(dict.fromkeys(name for row in rows for name in row if name not in left_out))
    lines = [names, *([_cell(name, row.get(name)) for name in names] for row in rows)]
    widths = [max(cells(line[n]) for line in lines) for n in range(len(names))]
    return [
        "  ".join(
            pad(text, width, right=n > 0)
            for n, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]


def _cell(name: str, value: object) -> str:
    if isinstance(value, float) and math.isfinite(value):
        whole = value.is_integer() and (name in SIZES or value >= 100) and value < WHOLE
        return f"{value:,.0f}" if whole else units.decimal(value)
    return "-" if value is None else one_line(str(value))


if __name__ == "__main__":
    process.fix_sets()
    sys.exit(program.run(main, __doc__, pages=True))
