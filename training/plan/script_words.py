"""The words of a command line with --script: the launcher's and the script's."""

from __future__ import annotations

from training.config import flags
from training.config.schema import FIELDS

SEPARATOR = "--"
# Fields that apply to the launch of any script.
USED = (
    *(
        name
        for name, field in FIELDS.items()
        if field.metadata["group"] == "launch" and name not in ("inject", "profile")
    ),
    *("run_name", "out_dir", "log_dir", "device", "hang_timeout", "report", "notify", "retries"),
)


def split(args: list[str]) -> tuple[list[str], list[str]]:
    """(the launcher's words, the script's)."""
    at = args.index(SEPARATOR) if SEPARATOR in args else len(args)
    return args[:at], args[at + 1 :]


def launch_words(words: list[str]) -> tuple[list[str], list[str]]:
    """(launcher flags, the rest) of the arguments of a program that was given without --script."""
    name = {word: word.removeprefix("--").partition("=")[0].replace("-", "_") for word in words}
    own = [
        word
        for word in words
        if word.startswith("--")
        and (name[word] in flags.SWITCHES or ("=" in word and name[word] in USED))
    ]
    return own, [word for word in words if word not in own and word != SEPARATOR]
