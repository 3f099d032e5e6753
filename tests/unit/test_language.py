"""What people read has none of the words that tests/language.py lists."""

from __future__ import annotations

from tests import language
from tests.cases import each

CALQUES = {
    "The file is no config and can not be read.": ["negated noun", "can not"],
    "Nobody has said so.": ["speech verb", "person"],
    "It goes on since 12 s, in a run of ours.": [
        "time or quantity",
        "stands, lies, goes on",
        "ours",
    ],
    "It ended. Of a script the curves are known.": ["fronted genitive"],
    "There is no run yet, and the run is no longer there.": [],
}


@each(("text", "found"), CALQUES.items())
def test_a_listed_word_is_found_in_prose(text: str, found: list[str]) -> None:
    names = [each.pattern.name for each in language.occurrences("a.md", text)]
    assert sorted(names) == sorted(found)
    assert len(language.occurrences("a.py", f'"""{text}"""\n')) == len(found)
    assert not language.occurrences("a.py", "ours = nobody  # language: quoted nobody\n")


def test_repository_has_none() -> None:
    found = [
        occurrence
        for name in language.files([])
        for occurrence in language.occurrences(name, (language.ROOT / name).read_text("utf-8"))
    ]
    assert not found, "\n".join(map(str, found))
