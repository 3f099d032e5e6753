"""Packages of `training/` ("rooms"): their imports, and the same list in the documentation."""

from __future__ import annotations

import ast
import functools
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.unit.conftest import ROOT

ROOMS = [
    "core",
    "config",
    "host",
    "data",
    "tasks",
    "inspector",
    "diagnose",
    "plan",
    "trainer",
    "watchdog",
    "launcher",
    "monitor",
    "cli",
]
# A function may import modules that load one of these, directly or indirectly …
HEAVY = {
    "torch",
    "numpy",
    "PIL",
    "psutil",
    "pynvml",
    "tqdm",
    "prometheus_client",
    "wandb",
    "torchao",
    "av",
    "lmdb",
    "difflib",
    "netrc",
    "tempfile",
}
# … and these modules, each for the given reason.
LATER = {
    "advice after an error: valid commands start faster": [
        "config.foreign_names",
        "config.meant",
        "plan.corrections",
    ],
    "only for duet launch: the other commands start faster": ["cli.run_words"],
    "only for fault injection": ["config.fault_spec", "trainer.inject"],
    "after a failure, or for a foreign log: patterns are compiled": [
        *(
            "diagnose.card",
            "diagnose.log_analysis",
            "diagnose.log_parsers.log_metrics",
            "diagnose.events",
            "diagnose.root_cause",
            "diagnose.scan",
        ),
        "diagnose.source",
        "launcher.rank_end",
    ],
    "only at the first start on GPUs, and for --check": [
        "launcher.communication.result",
        "launcher.communication.run",
    ],
    "only for --check": [
        *(f"plan.preflight.{n}" for n in ("data_checks", "gpu_health", "host_checks", "versions")),
    ],
    "only for one kind of task": [
        *(
            "tasks.gpt.memory",
            "tasks.gpt.planning",
            "tasks.gpt.step",
            "tasks.sample_plan",
            "tasks.video_restoration.kair.loader",
        ),
    ],
    "not needed by a rank started by the launcher": ["cli.draft", "plan.writer"],
    "after the heartbeat phase 'importing torch'": [
        *(
            "tasks",
            "trainer.error_file",
            "trainer.metrics_writer",
            "trainer.prepared_cache",
            "trainer.summary",
        ),
    ],
    "Ctrl-C must not print a traceback, even during imports": [
        *(
            "core.log",
            "core.rundir",
            "monitor.report.chart_render",
            "monitor.report.options",
        ),
    ],
    "one of several actions of a command": [
        "cli.completion",
        "launcher.supervisor",
        "monitor.attach",
        "monitor.prometheus",
        "monitor.terminal",
        "plan.option_help",
    ],
    "only for an archived run: tar and gzip": ["core.archive"],
    "only for runs without a recorded end": ["monitor.rank_states"],
    "only with W&B": ["host.wandb_login"],
    "not needed to list runs, which takes less time than these imports": [
        *("config.schema", "core.heartbeat", "core.redact", "host.packages", "tasks"),
    ],
    "only for a page: the chart package is searched": [
        *(f"monitor.report.{n}" for n in ("run", "sweep_page")),
    ],
}
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "training").rglob("*.py")
}


@functools.cache
def imports(module: str) -> list[tuple[str, int]]:
    """Modules of this project imported by a module at any nesting level, with the line, except
    imports for type checkers."""
    path, out = FILES[module], []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    types = {
        id(n)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and "TYPE_CHECKING" in ast.dump(test.test)
        for n in ast.walk(test)
    }
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if id(node) in types:
            continue
        if isinstance(node, ast.Import):
            out += [(alias.name, node.lineno) for alias in node.names if alias.name in FILES]
        elif isinstance(node, ast.ImportFrom):
            above = (
                package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            )
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                found = f"{base}.{alias.name}" if f"{base}.{alias.name}" in FILES else base
                if found in FILES and found != module:
                    out.append((found, node.lineno))
    return out


@functools.cache
def at_once(module: str) -> set[str]:
    """Modules that an import of `module` imports directly; external ones by name."""
    tree, found = ast.parse(FILES[module].read_text(encoding="utf-8")), set()
    inside = {
        id(n)
        for f in ast.walk(tree)
        if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))
        for n in ast.walk(f)
    }
    lines = {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in inside
    }
    found |= {other for other, line in imports(module) if line in lines}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in inside:
            found |= (
                {alias.name for alias in node.names}
                if isinstance(node, ast.Import)
                else {node.module or ""}
            )
    return found | ({module.rpartition(".")[0]} if module.count(".") > 1 else set())


def heavy(module: str) -> bool:
    seen, rest = set[str](), [module]
    while rest:
        if (name := rest.pop()) in seen:
            continue
        seen.add(name)
        if name.partition(".")[0] in HEAVY:
            return True
        rest += at_once(name) if name in FILES else ()
    return False


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_each_entry_is_a_package_with_a_docstring() -> None:
    entries = sorted(
        p.name
        for p in (ROOT / "training").iterdir()
        if p.name not in ("__init__.py", "__pycache__")
    )
    assert entries == sorted(ROOMS)
    assert [
        r
        for r in ROOMS
        if not ast.get_docstring(ast.parse(FILES[f"training.{r}"].read_text(encoding="utf-8")))
    ] == []


def test_imports_only_from_earlier_rooms() -> None:
    at = {name: i for i, name in enumerate(ROOMS)}
    wrong = [
        f"{FILES[module]}:{line} imports {other}"
        for module in FILES
        for other, line in imports(module)
        if room(module) and room(other) and at[room(other)] > at[room(module)]
    ]
    assert wrong == []


def test_no_circular_imports() -> None:
    # A module may import its package: `training` itself contains only the version.
    graph = {
        module: {other for other, _ in imports(module) if other != "training"} for module in FILES
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {error.args[1]}")


def test_imports_in_functions_are_heavy_or_listed() -> None:
    allowed = {f"training.{name}" for names in LATER.values() for name in names}
    wrong, used = [], set()
    for module, path in FILES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [
            n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        inside = {
            n.lineno: n
            for f in functions
            for n in ast.walk(f)
            if isinstance(n, (ast.Import, ast.ImportFrom))
        }
        ours = [(other, line) for other, line in imports(module) if line in inside]
        theirs = [
            (name, line)
            for line, node in inside.items()
            if line not in {at for _, at in ours}
            for name in (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
            )
        ]
        for other, line in [*ours, *theirs]:
            used.add(other)
            if not heavy(other) and other not in allowed:
                wrong.append(f"{path}:{line} imports {other}")
    assert wrong == [], "import it at the top or list it in LATER with a reason"
    assert allowed - used == set(), "no function imports it any more"


def test_the_inspector_imports_no_other_room() -> None:
    """It also runs where `training` is another project's package (lib/run_script.py), unlike
    inspector/distributed.py."""
    own = [m for m in FILES if room(m) == "inspector" and m != "training.inspector.distributed"]
    assert {
        other
        for module in own
        for other, _ in imports(module)
        if room(other) not in ("inspector", "")
    } == set()


def test_the_documentation_shows_the_same_rooms() -> None:
    text = Path(ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)/` \|", text.partition("| room |")[2], re.MULTILINE) == ROOMS


def test_the_stations_of_a_request_and_of_a_rank_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    stations = re.findall(r"^\| `([\w/]+\.py)` `(\w+)`", text, re.MULTILINE)
    assert len(stations) > 10
    for path, function in stations:
        source = (ROOT / "training" / path).read_text(encoding="utf-8")
        assert re.search(rf"^ *def {function}\(", source, re.MULTILINE), (path, function)
