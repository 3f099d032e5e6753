"""Every message has an English and a Chinese template, and every call gives the values it needs."""

from __future__ import annotations

import ast
import functools
import json
import re
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from training.core import messages, units
from training.core.project import ROOT
from training.diagnose import scan

ROOMS = sorted(file.stem for file in messages.FOLDER.glob("*.json") if file.stem != "units")
TEMPLATES = {key: one for room in ROOMS for key, one in messages.templates(room).items()}


@functools.cache
def every_call() -> list[tuple[str, str, ast.Call]]:
    """(file:line, name of the function, call) of all calls in the product."""
    return [
        (
            f"{file.relative_to(ROOT)}:{node.lineno}",
            getattr(node.func, "id", getattr(node.func, "attr", "")),
            node,
        )
        for folder in ("training", "lib")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]


def calls(name: str) -> Iterator[tuple[str, ast.Call]]:
    yield from ((place, call) for place, called, call in every_call() if called == name)


def names(template: str) -> set[str]:
    parsed = list(string.Formatter().parse(template))
    inner = {name for _, _, spec, _ in parsed if spec for name in names(spec)}
    return inner | {name for _, name, _, _ in parsed if name}


def test_calls_and_catalogue_agree() -> None:
    used, wrong = set[str](), list[str]()
    for place, call in calls("msg"):
        first = call.args[0]
        if not (isinstance(first, ast.Constant) and isinstance(first.value, str)):
            wrong.append(f"{place}: the ID is not a literal")
            continue
        used.add(first.value)
        given = {word.arg for word in call.keywords}
        if first.value not in TEMPLATES:
            wrong.append(f"{place}: unknown ID {first.value}")
        elif given and given != names(TEMPLATES[first.value]["en"]):
            wrong.append(f"{place}: {first.value} has other placeholders than {sorted(given)}")
        elif not given and names(TEMPLATES[first.value]["en"]):
            wrong.append(f"{place}: {first.value} needs values")
    wrong += [f"unused ID {one}" for one in sorted(TEMPLATES.keys() - used)]
    assert not wrong, "\n".join(wrong)


def test_both_languages_have_the_same_placeholders() -> None:
    wrong = []
    for key, one in TEMPLATES.items():
        if one.keys() != {"en", "zh"} or not all(text.strip() for text in one.values()):
            wrong.append(f"{key}: {sorted(one)}")
        # a template without values is not formatted: a brace in it is only a brace
        elif (with_values := "{" in one["en"]) and names(one["en"]) != names(one["zh"]):
            wrong.append(f"{key}: {one['en']} | {one['zh']} {with_values}")
    assert not wrong, "\n".join(wrong)


def test_each_room_has_its_own_file() -> None:
    for room in ROOMS:
        assert (ROOT / ("" if room == "lib" else "training") / room).is_dir()
        text = (messages.FOLDER / f"{room}.json").read_text(encoding="utf-8")
        known = json.loads(text, object_pairs_hook=lambda pairs: pairs)
        keys = [key for key, _ in known]
        assert keys == sorted(set(keys)) and all(key.startswith(f"{room}.") for key in keys)


class Anything:
    """A value for any placeholder."""

    def __format__(self, spec: str) -> str:
        return "7"

    def __getattr__(self, name: str) -> Anything:
        return self


class Everything(dict[str, Anything]):
    def __missing__(self, name: str) -> Anything:
        return Anything()


def test_a_log_is_diagnosed_alike_in_both_languages() -> None:
    wrong = []
    for key, one in TEMPLATES.items():
        found = {}
        for language, template in one.items():
            text = template.format_map(Everything()) if "{" in one["en"] else template
            line = f"[ERROR] 2025-11-06 10:00:00 {text}"
            found[language] = {signature.id for signature in scan.recognised(line)}
        if found["en"] - found["zh"]:
            wrong.append(f"{key}: {found['en'] - found['zh']} {one['zh']}")
    assert not wrong, "\n".join(wrong)


def test_headings_of_columns_are_translated() -> None:
    """But for technical terms."""
    same = {
        one["zh"]
        for key, one in TEMPLATES.items()
        if key.startswith("monitor.column.") and one["zh"].isascii()
    }
    assert same <= {"CPU", "RANKS"}, same


def test_shell_messages_take_the_same_values_in_chinese() -> None:
    code = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "lib").glob("*.sh"))
    call = r"""messages::(?:text|info|warn|error|refuse) ([a-z_.]+) (?:\\\n\s*)?(["'])(.*?)\2(?=[ \n])"""
    english = {key: text for key, _, text in re.findall(call, code)}
    table = (ROOT / "lib/messages_zh.sh").read_text(encoding="utf-8")
    chinese = {
        key: text for key, _, text in re.findall(r"""\["([a-z_.]+)"\]=(["'])(.*)\2\n""", table)
    }
    assert english.keys() == chinese.keys()
    assert list(english) and all(
        re.findall("%.", text) == re.findall("%.", chinese[key]) for key, text in english.items()
    )


def test_every_counted_word_has_a_chinese_form() -> None:
    counted = {
        call.args[1].value
        for _, call in calls("plural")
        if len(call.args) > 1 and isinstance(call.args[1], ast.Constant)
    }
    assert counted <= messages.templates("units").keys()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "zh_CN.GBK"}, "en"),
        ({"LANG": "zh_CN.GBK", "DUET_LANG": "zh"}, "zh"),
        ({"LC_ALL": "C", "DUET_LANG": "zh"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "DUET_LANG": "en"}, "en"),
    ],
)
def test_language(environ: dict[str, str], expected: str) -> None:
    assert messages.language(environ) == expected


def test_message_in_both_languages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUET_LANG", "en")
    assert messages.msg("launcher.retry.rank", rank=1) == "rank 1"
    assert units.plural(1, "restart") == "1 restart"
    monkeypatch.setenv("DUET_LANG", "zh")
    assert units.plural(2, "restart") == "2 次重启"
    assert Path(messages.FOLDER / "launcher.json").exists()
    with pytest.raises(KeyError):
        messages.msg("launcher.no_such_message")
