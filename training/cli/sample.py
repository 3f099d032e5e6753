"""Continue text with a trained language model, on a CPU or a GPU.

Usage: ./duet sample [RUN] [--prompt=TEXT] [--max_tokens=256]
                     [--temperature=0.8]

  RUN                 a run directory, the name of a run, latest (default), a
                      checkpoint folder, or a folder of ./duet export;
                      RUN/best: its checkpoint with the best evaluation
  --prompt=TEXT       text to continue; -: read standard input. Without it: on a
                      terminal a conversation, else text from nothing
  --prompts=FILE      one prompt per line
  --max_tokens=256    per sample; a sample ends earlier where its document ends
  --temperature=0.8   0: always the most likely token
  --top_k=0           draw from the K most likely tokens; 0: from all
  --seed=N            repeat the same samples; default: drawn
  --num=1             samples per prompt, computed together as far as memory
                      allows
  --device=auto       cuda if a GPU is free; cpu
  --weights=ema       the moving average of --ema, the default where there is
                      one; raw: the weights as trained
  --json              print one JSON object at the end

In a conversation Ctrl-C stops an answer and Ctrl-D ends. Each prompt is a new
text: the model does not see the earlier ones.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from training import tasks
from training.cli import spare_gpu, weights_argument
from training.core import args, json_text, units
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg
from training.core.plain_text import one_line
from training.core.project import typed
from training.host import program
from training.tasks.weights import Weights

if TYPE_CHECKING:
    from training.tasks.trained import TextModel

COMMAND = "./duet sample"
SEEDS = 1 << 31
FLAGS = {
    "prompt": args.Flag(str, empty=True),  # text from nothing
    "prompts": args.TEXT,
    "max_tokens": args.whole(1, 1 << 20, 256),
    "temperature": args.number(0.0, 100.0, 0.8),
    "top_k": args.whole(0, 1 << 20, 50),
    "seed": args.whole(0, SEEDS - 1, 1),
    "num": args.whole(1, 1024, 3),
    "device": args.one_of(*weights_argument.DEVICES),
    "json": args.SWITCH,
    "weights": weights_argument.KIND,
    "help": args.SWITCH,
}
# what a terminal obeys is not text
CONTROL = {n: "\ufffd" for n in (*range(32), *range(127, 160)) if chr(n) not in "\n\t"}


@dataclass
class SampleOptions:
    """A checked command line. `prompts`: None for a conversation."""

    weights: Weights | None = None
    prompts: list[str] | None = field(default_factory=list)
    max_tokens: int = 256
    temperature: float = 0.8
    top_k: int = 0
    seed: int = 0
    seeded: bool = False  # by --seed
    num: int = 1
    device: str = "auto"
    json: bool = False
    help: bool = False


def parse(argv: list[str]) -> SampleOptions:
    """Raises UserError with all problems at once."""
    line = args.parse(argv, FLAGS, COMMAND)
    values, problems = line.values, line.problems
    if "help" in values:
        return SampleOptions(help=True)
    prompts = _prompts(line, problems)
    found = weights_argument.one(line.words, line, problems)
    if found and not tasks.spec_of(found.plan).writes_text:
        problems.append(
            Problem(
                "task.unsupported",
                msg("cli.sample.no_text", name=found.name, task=tasks.task_of(found.plan)["name"]),
                msg("cli.sample.text_wanted"),
            )
        )
    if problems:
        raise UserError(problems)
    if values.get("prompt") == "-":
        prompts = [_standard_input(line)]  # read last: it may take long
    names = ("max_tokens", "temperature", "top_k", "num", "device")
    chosen = {name: values[name] for name in names if name in values}
    return SampleOptions(
        found,
        prompts,
        seed=values.get("seed", random.randrange(SEEDS)),
        seeded="seed" in values,
        json="json" in values,
        **chosen,
    )


def _prompts(line: args.Args, problems: list[Problem]) -> list[str] | None:
    values = line.values
    given = [name for name in ("prompt", "prompts") if isinstance(values.get(name), str)]
    if len(given) > 1:
        problems.append(
            Problem(
                "flag.contradiction",
                msg("cli.sample.two_prompts"),
                msg("monitor.option.one_of_them"),
                [line.again(prompts=None), line.again(prompt=None)],
            )
        )
        return []
    if not given:
        return (
            None if sys.stdin is not None and sys.stdin.isatty() and "json" not in values else [""]
        )
    text = str(values[given[0]])
    if given == ["prompt"]:
        try:
            return [_decoded(os.fsencode(text))]
        except ValueError as error:
            problems.append(_unreadable(text.encode("utf-8", "replace").decode(), error))
            return []
    try:
        lines = _decoded(Path(text).expanduser().read_bytes()).replace("\r\n", "\n").split("\n")
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        problems.append(
            Problem(
                "prompts.unreadable",
                msg("cli.sample.prompts_unreadable", file=text, reason=reason),
                msg("cli.sample.prompts_wanted"),
            )
        )
        return []
    found = [one for one in lines if one.strip()]
    if not found:
        problems.append(
            Problem(
                "prompts.unreadable",
                msg("cli.sample.prompts_empty", file=text),
                msg("cli.sample.prompts_wanted"),
            )
        )
    return found


def _standard_input(line: args.Args) -> str:
    """Raises UserError, also without any text: lib/init.sh opens a closed one as /dev/null."""
    try:
        if text := _decoded(sys.stdin.buffer.read()) if sys.stdin else "":
            return text
        raise ValueError(msg("cli.sample.input_empty"))
    except (OSError, ValueError) as error:
        problem = _unreadable("-", getattr(error, "strerror", None) or error)
        fixes = [line.again(prompt="Once upon a time")]
        raise UserError(replace(problem, fixes=fixes)) from None


def _decoded(raw: bytes) -> str:
    """Without a byte order mark. Raises ValueError with a sentence."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(msg("cli.sample.not_utf8", number=error.start + 1)) from None


def _unreadable(typed: str, reason: object) -> Problem:
    what = msg("cli.sample.prompt_unreadable", typed=typed, reason=reason)
    return Problem("prompts.unreadable", what, msg("cli.sample.prompt_wanted"))


def main(argv: list[str]) -> int:
    chosen = parse(argv)
    if chosen.help:
        print(typed((__doc__ or "").strip()))
        return int(Exit.DONE)
    assert chosen.weights
    program.require(("torch", "numpy"))
    from training.tasks import trained

    spec = tasks.spec_of(chosen.weights.plan)
    chosen.device = spare_gpu.choose(chosen.device)
    model = trained.load(spec, chosen.weights, chosen.device)
    assert isinstance(model, trained.TextModel), "checked with the command line"
    for stream in (sys.stdout, sys.stdin):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if chosen.prompts is None:
        _converse(model, chosen)
        return int(Exit.DONE)
    begun, several = time.perf_counter(), len(chosen.prompts) > 1
    found: list[Sample] = []
    for number, prompt in enumerate(chosen.prompts):
        model, samples = _samples(model, chosen, prompt, number, several)
        found += samples
    if chosen.json:
        record = {
            "run": model.weights.name,
            "step": model.weights.step,
            "weights": model.weights.kind,
            "device": str(model.device),
            "seed": chosen.seed,
            "tokens_per_s": _speed(found, begun),
            "samples": [vars(sample) for sample in found],
        }
        print(json_text.answer(record))
    else:
        _report(found, begun, chosen)
    return int(Exit.DONE)


@dataclass
class Sample:
    prompt: str
    text: str = ""  # of the continuation
    tokens: int = 0
    end: str = "length"  # length: max_tokens; document: the model has ended it


def _samples(
    model: TextModel, chosen: SampleOptions, prompt: str, number: int = 0, several: bool = False
) -> tuple[TextModel, list[Sample]]:
    """The samples of a prompt, and the model for the next ones: where the GPU lacks memory, the
    samples are generated again on the CPU, as in trained.load()."""
    from training.tasks import trained

    spec = tasks.spec_of(model.weights.plan)
    generate = partial(_generated, chosen=chosen, prompt=prompt, number=number, several=several)
    return trained.using(spec, model, chosen.device, generate)


def _generated(
    model: TextModel, chosen: SampleOptions, prompt: str, number: int, several: bool
) -> list[Sample]:
    """Without --json the prompt (outside a conversation) and the first sample are printed as they
    are generated, then the others."""
    found = [Sample(prompt) for _ in range(chosen.num)]
    shown = "" if chosen.prompts is None else prompt
    titled = several or chosen.num > 1
    # with the first token: until then a GPU may lack memory, and all is generated again
    head = _title(number, 0) * titled + shown
    how = (chosen.max_tokens, chosen.temperature, chosen.top_k)
    size = model.together(prompt, chosen.max_tokens)
    for begin in range(0, chosen.num, size):
        part = found[begin : begin + size]
        for step in model.stream(prompt, *how, chosen.seed + begin, len(part)):
            for sample, text, live in zip(part, step.texts, step.live, strict=True):
                sample.text += text
                sample.tokens += live
            if not begin:
                _write(chosen, head + step.texts[0])
                head = ""
        if not begin:
            _write(chosen, head)
        for place, sample in enumerate(part, begin):
            sample.end = "length" if sample.tokens == chosen.max_tokens else "document"
            if place:
                _write(chosen, "\n" + _title(number, place) + shown + sample.text)
    _write(chosen, "\n")
    return found


def _title(prompt: int, sample: int) -> str:
    return f"── {msg('cli.sample.title', prompt=prompt + 1, sample=sample + 1)} ──\n"


def _write(chosen: SampleOptions, text: str) -> None:
    if not chosen.json and text:
        sys.stdout.write(text.translate(CONTROL) if sys.stdout.isatty() else text)
        sys.stdout.flush()


def _speed(found: list[Sample], begun: float) -> float:
    """Tokens per second of all samples."""
    return round(sum(sample.tokens for sample in found) / (time.perf_counter() - begun), 1)


def _report(found: list[Sample], begun: float, chosen: SampleOptions) -> None:
    """Speed and seed, on a terminal only."""
    if sys.stderr.isatty():
        tokens = units.plural(sum(sample.tokens for sample in found), "token")
        print(
            msg("cli.sample.speed", tokens=tokens, speed=_speed(found, begun), seed=chosen.seed),
            file=sys.stderr,
        )


def _converse(model: TextModel, chosen: SampleOptions) -> None:
    with contextlib.suppress(ImportError):
        import_module("readline")  # gives input() a line editor
    title = one_line(model.weights.title)
    print(msg("cli.sample.conversation", title=title), file=sys.stderr)
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        try:
            begun = time.perf_counter()
            model, found = _samples(model, chosen, prompt)
            _report(found, begun, chosen)
        except KeyboardInterrupt:
            print()
        chosen.seed = chosen.seed if chosen.seeded else random.randrange(SEEDS)


if __name__ == "__main__":
    sys.exit(program.run(main, __doc__))
