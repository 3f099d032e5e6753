"""Many cases in one test: `each` replaces `pytest.mark.parametrize` where that would make hundreds
of tests of a few milliseconds."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet

Test = Callable[..., None]
SHOWN = 10  # failures with traceback; the others by id


def each(
    names: str | Sequence[str], cases: Iterable[Any], *, ids: Callable[[Any], str] | None = None
) -> Callable[[Test], Test]:
    """Decorator with the arguments of `pytest.mark.parametrize`: runs all cases and reports all
    failures together. The cases share the test's fixtures, except that each has its own empty
    `tmp_path` and its own `monkeypatch`."""
    known = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = [_row(known, case, ids) for case in cases]
    assert rows, "no case"

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def loop(**fixtures: Any) -> None:
            failed = dict[str, str]()
            for number, (name, values) in enumerate(rows):
                try:
                    with pytest.MonkeyPatch.context() as patch:
                        own: dict[str, Any] = {"monkeypatch": patch}
                        if "tmp_path" in fixtures:
                            own["tmp_path"] = fixtures["tmp_path"] / str(number)
                            own["tmp_path"].mkdir()
                        test(
                            **{key: own.get(key, value) for key, value in fixtures.items()},
                            **values,
                        )
                except (Exception, pytest.fail.Exception) as problem:
                    failed[f"{number}: {name}"] = str(
                        pytest.ExceptionInfo.from_exception(problem).getrepr(style="short")
                    )
            if failed:
                parts = [f"── {name}\n{text}" for name, text in list(failed.items())[:SHOWN]]
                parts += [f"── {name}" for name in list(failed)[SHOWN:]]
                pytest.fail(
                    "\n".join([f"{len(failed)} of {len(rows)} cases failed", *parts]), pytrace=False
                )

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in known]
        assert len(kept) == len(signature.parameters) - len(known), (
            f"{test.__name__} does not take {known}"
        )
        loop.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]  # read by pytest for the fixtures
        return loop

    return decorate


def _row(
    names: list[str], case: Any, ids: Callable[[Any], str] | None
) -> tuple[str, dict[str, Any]]:
    """(id, argument → value) of a case."""
    name = None
    if isinstance(case, ParameterSet):
        assert not case.marks, "marks apply to the whole test"
        name, values = case.id, tuple(case.values)
    else:
        values = (case,) if len(names) == 1 else tuple(case)
    shown = "-".join(ids(value) if ids else repr(value)[:60] for value in values)
    return str(name or shown), dict(zip(names, values, strict=True))
