"""Tests with the marker gpu (tests/gpu), as stages: by pytest in the Python with the GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.bench import Bench, Failed, Program, Skipped, check

NOTHING_COLLECTED = 5  # pytest's exit status
REPORTED = re.compile(r"^\S+::(.+) (PASSED|FAILED|SKIPPED)\b", re.MULTILINE)  # a line of pytest -v
_NOT_TIMED: dict[str, Any] = {"seconds": None, "reason": "", "properties": {}}


def stage(files: str, smoke: str) -> Callable[[Bench], dict[str, Any]]:
    """All tests of these files, or those that match `smoke` in a smoke run."""
    return lambda bench: run(bench, files, smoke)


def run(bench: Bench, files: str, smoke: str) -> dict[str, Any]:
    """Outcome and seconds of each test, and the properties that it has recorded."""
    if "pytest" in bench.machine.missing:
        raise Skipped(f"pytest is not installed for {bench.machine.executable}")
    results, console = bench.folder / "results.xml", bench.folder / "pytest.txt"
    argv = [bench.machine.executable, "-m", "pytest", "-v", "-m", "gpu", *files.split()]
    argv += ["-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={results}"]
    argv += [f"--basetemp={bench.folder / 'tmp'}", *(["-k", smoke] if bench.smoke else [])]
    program = Program(argv, console)
    try:
        (status,) = bench.run([program])
    except Failed as error:
        ended = REPORTED.findall(console.read_text(errors="replace")) if console.exists() else []
        found = [_NOT_TIMED | {"name": name, "outcome": how.lower()} for name, how in ended]
        raise Failed(str(error), {"tests": found, "checks": []}) from None
    if not results.exists() or status == NOTHING_COLLECTED:
        raise Failed(f"pytest: exit status {status}\n{program.end_of_output()}")
    tests = [_test(case) for case in ElementTree.parse(results).iter("testcase")]
    failed = [test["name"] for test in tests if test["outcome"] == "failed"]
    passed = sum(test["outcome"] == "passed" for test in tests)
    text = f"{passed} passed, {len(failed)} failed" + "".join(f"; {name}" for name in failed)
    return {"tests": tests, "checks": [check(files, not failed and passed > 0, text)]}


def _test(case: ElementTree.Element) -> dict[str, Any]:
    problem = next((part for part in case if part.tag in ("failure", "error")), None)
    skip = case.find("skipped")
    reason = problem if problem is not None else skip
    return {
        "name": case.get("name"),
        "outcome": "failed" if problem is not None else "passed" if skip is None else "skipped",
        "seconds": float(case.get("time") or 0),
        "reason": (reason.get("message") or "")[:400] if reason is not None else "",
        "properties": {p.get("name"): p.get("value") for p in case.iter("property")},
    }
