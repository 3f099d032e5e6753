"""User task: one Python file with a Task class and its options, OPTIONS = {"name": default, …}."""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import importlib.util
import inspect
import keyword
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import training
from training.config.flags import ACTIONS, ALIASES
from training.config.schema import FIELDS, Config, option, shared
from training.core import log, manifest
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.core.phases import EVALUATIONS
from training.core.suggest import suggest
from training.core.units import unknown
from training.tasks import own_modules
from training.tasks.sample_spec import SampleSpec

if TYPE_CHECKING:
    import torch

    from training.core.contracts.plan import Plan
    from training.data.prepared_corpus import PreparedCorpus
    from training.tasks.base import Task
    from training.tasks.trained import Trained
    from training.tasks.weights import Weights

OPTIONS = "OPTIONS"
NO_TASKS = ("torch", "torchvision", "numpy")
REQUIRED = ("model", "train_data", "loss")  # abstract methods of training.tasks.base.Task
EVAL_BATCH = "eval_batch"  # of training.tasks.base.Task
KINDS = ("bool", "int", "float", "str")


@dataclass(frozen=True)
class CustomSpec(SampleSpec):
    """Spec of a task in a user's file."""

    def trained(
        self, weights: Weights, state: Mapping[str, torch.Tensor], device: torch.device
    ) -> Trained:
        if self.file is None or not self.file.is_file():
            what = msg("tasks.custom.lost", name=self.name, file=self.file or unknown())
            raise UserError(Problem("task.unreadable", what, msg("tasks.custom.lost_wanted")))
        then = weights.facts.get("task_sha256")
        if then and then != manifest.sha256(self.file):
            folder = weights.file.parent
            log.warning(msg("tasks.custom.changed", file=self.file, checkpoint=folder))
        return super().trained(weights, state, device)

    def lighter_in(self, phase: str) -> str | None:
        if phase in EVALUATIONS and self.file and _evaluates_alone(self.file):
            return msg("tasks.custom.lighter_evaluation", file=self.file)
        return super().lighter_in(phase)

    def make(self, plan: Plan, device: torch.device, data: PreparedCorpus | None) -> Task:
        assert self.file
        return load(self.file, plan["task"]["options"], Config(**plan["config"]), device)


def read(
    path: Path, origin: str, known: Sequence[str]
) -> tuple[dict[str, Field[Any]], list[Problem]]:
    """Options of the file as fields, read without running it: only ranks run it. `known`: names of
    the built-in tasks."""
    shown = msg("tasks.custom.given", path=str(path), origin=origin)
    if path.suffix != ".py":
        fixes = [f"--task={near}" for near in suggest(str(path), list(known))]
        return {}, [
            Problem(
                "task.not_python",
                msg("tasks.custom.unknown", shown=shown),
                msg("tasks.custom.known", known=", ".join(known)),
                fixes,
            )
        ]
    if path.stem in known:  # plans and checkpoints store this name
        return {}, [
            Problem(
                "task.name_taken",
                msg("tasks.custom.built_in", shown=shown, stem=path.stem),
                msg("tasks.custom.other_name"),
            )
        ]
    if hides := _hidden(path):
        return {}, [
            Problem(
                "task.name_taken",
                msg("tasks.custom.hides", shown=shown, hides=hides),
                msg("tasks.custom.other_name"),
            )
        ]
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        where = f"{path}:{error.lineno}" if error.lineno else str(path)  # 0: unknown encoding
        return {}, [
            Problem(
                "task.syntax",
                f"{where}: {error.msg}: {(error.text or '').strip()!r}",
                msg("tasks.custom.python_file"),
            )
        ]
    except (OSError, ValueError, RecursionError) as error:
        near = [p.name for p in path.parent.glob("*.py")] if os.path.isdir(path.parent) else []
        fixes = [
            f"--task={shlex.quote(str(path.with_name(name)))}" for name in suggest(path.name, near)
        ]
        return {}, [
            Problem(
                "task.unreadable",
                msg(
                    "tasks.custom.unreadable",
                    shown=shown,
                    reason=getattr(error, "strerror", None) or error,
                ),
                msg("tasks.custom.python_file"),
                fixes,
            )
        ]
    if not _may_have_task(tree):
        return {}, [
            Problem(
                "task.no_class",
                msg("tasks.custom.no_class", shown=shown),
                msg("tasks.custom.class_wanted"),
            )
        ]
    if lacking := _lacking(tree):
        what = msg(
            "tasks.custom.class_lacks",
            path=path,
            lineno=lacking[0].lineno,
            name=lacking[0].name,
            lacking=", ".join(lacking[1]),
        )
        return {}, [
            Problem(
                "task.several_classes",
                what,
                msg("tasks.custom.methods", methods=", ".join(REQUIRED)),
            )
        ]
    given = [
        node
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and _names(node) == [OPTIONS]
    ]
    found: dict[str, Field[Any]] = {}
    problems: list[Problem] = []
    for node in given:
        where = f"{path}:{node.lineno}"
        try:
            options = ast.literal_eval(node.value or "")
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            options = None
        if not isinstance(options, dict):
            problems.append(
                Problem(
                    "task.options",
                    msg("tasks.custom.options_unread", where=where, options=OPTIONS),
                    f'{OPTIONS} = {{"width": 64}}',
                )
            )
            continue
        problems += [p for name, value in options.items() if (p := _problem(where, name, value))]
        if not problems:
            found |= _fields(options)
    return found, problems


def _evaluates_alone(file: Path) -> bool:
    """Whether the file sets eval_batch, so that an evaluation does not use the micro-batch."""
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return False
    return any(
        isinstance(node, (ast.Name, ast.Attribute))
        and isinstance(node.ctx, ast.Store)
        and (node.id if isinstance(node, ast.Name) else node.attr) == EVAL_BATCH
        for node in ast.walk(tree)
    )


def _may_have_task(tree: ast.Module) -> bool:
    """Whether a class of the file may be a Task, as far as the source alone shows."""
    modules = _modules(tree)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    bases = {ast.unparse(base) for node in classes.values() for base in node.bases}
    return any(_may_be_task(base, modules) for base in bases - classes.keys())


def _lacking(tree: ast.Module) -> tuple[ast.ClassDef, list[str]] | None:
    """The last Task class of the file and its missing methods, if no class is complete as far as
    the source alone shows."""
    modules = _modules(tree)
    # Task class in this file → methods that it and its bases in this file define
    known: dict[str, set[str]] = {"Task": set()}
    found: tuple[ast.ClassDef, list[str]] | None = None
    for node in (n for n in tree.body if isinstance(n, ast.ClassDef) and n.bases):
        bases = [ast.unparse(base) for base in node.bases]
        ours = [base.rpartition(".")[2] for base in bases if base.rpartition(".")[2] in known]
        if any(
            _may_be_task(base, modules) for base in bases if base.rpartition(".")[2] not in known
        ):
            return None  # checked when the file runs
        if not ours:
            continue
        own = {
            n.name for n in ast.walk(node) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        own |= {
            n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        known[node.name] = own.union(*(known[base] for base in ours))
        if not (lacks := [name for name in REQUIRED if name not in known[node.name]]):
            return None
        found = node, lacks
    return found


def _modules(tree: ast.Module) -> dict[str, str]:
    """Imported name → its package."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                (n.asname or n.name).partition(".")[0]: n.name.partition(".")[0] for n in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            found |= {n.asname or n.name: (node.module or "").partition(".")[0] for n in node.names}
    return found


def _may_be_task(base: str, modules: Mapping[str, str]) -> bool:
    """Whether an imported base class may be a Task; datasets, modules and exceptions are not."""
    package = modules.get(base.partition(".")[0])
    return not (
        package in NO_TASKS
        or package in sys.stdlib_module_names
        or (package is None and hasattr(builtins, base))
    )


def _names(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _problem(where: str, name: Any, value: Any) -> Problem | None:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        return Problem(
            "task.option_name",
            msg("tasks.custom.option_invalid", where=where, name=name, options=OPTIONS),
            msg("tasks.custom.characters"),
        )
    # --lang is the language of the messages, for every command
    if name in (*ACTIONS, *ALIASES, "lang") or (name in FIELDS and shared(name)):
        return Problem(
            "task.option_name",
            msg("tasks.custom.option_common", where=where, name=name, options=OPTIONS),
            msg("tasks.custom.option_other"),
        )
    if type(value).__name__ not in KINDS:
        what = msg(
            "tasks.custom.option_type",
            where=where,
            name=name,
            options=OPTIONS,
            type=type(value).__name__,
        )
        return Problem("task.option_value", what, msg("tasks.custom.option_values"))
    if isinstance(value, float) and not math.isfinite(value):  # as for the value of a flag
        what = msg(
            "tasks.custom.option_infinite", where=where, name=name, options=OPTIONS, value=value
        )
        return Problem("task.option_value", what, msg("tasks.custom.option_values"))
    return None


def _hidden(path: Path) -> str:
    """The module that a file of this name would replace for everything in the process, or ""."""
    name = path.stem
    if name in sys.stdlib_module_names:
        return msg("tasks.custom.standard_module", name=name)
    if name == training.__name__:
        return msg("tasks.custom.own_package", name=name)
    spec = importlib.machinery.PathFinder.find_spec(name) if name.isidentifier() else None
    origin = Path(spec.origin) if spec and spec.origin else path
    installed = {"site-packages", "dist-packages"} & {*origin.parts}
    return str(origin) if installed and origin.resolve() != path.resolve() else ""


def _fields(options: Mapping[str, Any]) -> dict[str, Field[Any]]:
    """Options as fields: the type of the default gives the same checks as for any field."""
    made = make_dataclass(
        "Options",
        [(n, type(v).__name__, option(v, "data", "of the task's own")) for n, v in options.items()],
    )
    return {f.name: f for f in fields(made)}


def load(path: Path, options: Mapping[str, Any], config: Config, device: torch.device) -> Task:
    """Run the file and make its task. Raises whatever the file raises, and TypeError if no class is
    a complete task."""

    from training.tasks import returned
    from training.tasks.base import Task

    own_modules.use(path.parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    checksum = manifest.sha256(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    found = [
        c
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, Task) and c.__module__ == path.stem
    ]
    whole = [c for c in found if not inspect.isabstract(c)]
    if not whole:
        lacks = "; ".join(
            f"{c.__name__} lacks {', '.join(sorted(c.__abstractmethods__))}" for c in found
        )
        error = TypeError(
            f"{path} has no class that is a complete Task{f': {lacks}' if lacks else ''}"
        )
        line = inspect.getsourcelines(found[-1])[1] if found else 1
        returned.raise_at(error, str(path), line, found[-1].__name__ if found else "<module>")
    # a run from before an option was added takes its default
    options = {**getattr(module, OPTIONS, {}), **options}
    task = whole[-1](SimpleNamespace(**options), config, device)
    task.file_sha256 = checksum
    return task
