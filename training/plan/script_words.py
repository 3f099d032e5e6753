"""The words of a command line with --script: the launcher's and the script's."""

from __future__ import annotations

import shlex

from training.config import flags
from training.config.schema import FIELDS

SEPARATOR = "--"
WATCH = "watch"  # launcher of a plan whose ranks the program itself starts
RUN = "duet run"  # the other command that launches a script; lib/init.sh passes its name
WATCHING = "duet watch"  # becomes RUN with the flag --watch
PROGRAM = ("script", "module", "no_python", "watch")  # flags that name what is launched
# Fields that apply to the launch of any script.
USED = (
    *(
        name
        for name, field in FIELDS.items()
        if field.metadata["group"] == "launch" and name not in ("inject", "profile")
    ),
    *("run_name", "out_dir", "log_dir", "device", "hang_timeout", "report", "notify", "retries"),
    *("min_ranks", "rejoin"),
)


def split(args: list[str]) -> tuple[list[str], list[str]]:
    """(the launcher's words, the script's)."""
    at = args.index(SEPARATOR) if SEPARATOR in args else len(args)
    return args[:at], args[at + 1 :]


def asked_for(args: list[str]) -> bool:
    """Whether --script is on the command line; arguments after -- belong to the script."""
    return any(word == "--script" or word.startswith("--script=") for word in split(args)[0])


def as_run(own: list[str], changed: list[str], theirs: list[str]) -> str:
    """The launcher's words for launch_train.sh, further flags quoted for the shell, and the
    script's words, as a command line of `duet run`."""
    line = flags.parse(own)
    watch = line.on("watch")
    program = [SEPARATOR] if watch else ["--no-python"] if line.on("no_python") else []
    program += ["-m"] if line.on("module") else []
    other = [shlex.split(word)[0] for word in changed if word.startswith("--script=")]
    changed = [word for word in changed if not word.startswith("--script=")]
    found = other[-1].removeprefix("--script=") if other else line.flags.get("script", ("", ""))[0]
    program += [found] if found else []
    moved = {i for name, *span in line.places if name in PROGRAM for i in range(*span)}
    moved |= set(line.positional_at[:1])
    kept = [word for i, word in enumerate(own) if i not in moved]
    number = ["-n", *line.positional[:1]] if line.positional else []
    before, after = [*([] if watch else number), *kept], [*program, *theirs]
    return " ".join(
        [
            f"./duet {'watch' if watch else 'run'}",
            *map(shlex.quote, before),
            *changed,
            shlex.join(after),
        ]
    )


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
