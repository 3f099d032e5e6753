"""`--lang=zh` of `train.py`, as lib/init.sh reads it for the scripts. Set before other modules are
imported: some make their messages then."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

from training.core import log
from training.core.errors import Problem, UserError
from training.core.messages import LANGUAGES, VARIABLE, msg


def choose(words: Sequence[str], environ: MutableMapping[str, str]) -> list[str]:
    """`words` without the flag. Exits with 2 for another language."""
    rest, left = list(words), list[str]()
    while rest and rest[0] != "--":
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if name != "--lang":
            left.append(word)
            continue
        text = text if equals else rest.pop(0) if rest else ""
        if text not in LANGUAGES:
            what = msg("core.args.is", name="lang", text=text)
            error = UserError(Problem("lang.value", what, ", ".join(LANGUAGES), ["--lang=zh"]))
            log.report(error)
            raise SystemExit(int(error.code))
        environ[VARIABLE] = text
    return left + rest
