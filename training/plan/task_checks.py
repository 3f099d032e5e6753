"""What the task of a run does not accept: options, data, batch, and the model of a checkpoint."""

from __future__ import annotations

from training.core.errors import Problem
from training.data.corpus import CorpusSource
from training.plan import field_checks, init_from, resume_checks
from training.plan.cli_args import ParsedArgs


def check(
    asked: ParsedArgs, ranks: int, *, installed: bool
) -> tuple[CorpusSource | None, list[Problem]]:
    """The text to train on, and the problems of this task; none if it cannot be read: the default
    one, in its place, has other rules. `ranks`: of the run; 0: unknown."""
    if not asked.task_known:
        return None, []
    kind, resolved = asked.kind, asked.resolved
    config, origins = resolved.config, resolved.origins
    whole = not (resolved.problems or asked.file.problems)
    source, wrong = kind.check(config, resolved.options, origins, installed=installed, whole=whole)
    divides = ranks and not asked.bad(kind.sizes)
    problems = [*(kind.divides(config, origins, ranks) if divides else []), *wrong]
    problems += field_checks.of_task(kind, config, origins, ranks)
    problems += init_from.differences(asked.start, kind, resolved) if asked.start else []
    if asked.resume_from:
        problems += resume_checks.problems(kind, asked.resume_from, resolved, asked.resumed)
    return source, problems
