"""Is there a secret in a command that everybody can read: in plan.json, in the log, in the list of
processes?"""

from __future__ import annotations

import re

from training.core.errors import Problem
from training.core.redact import (
    CLOUD_KEY,
    LOGIN_IN_ADDRESS,
    LONG_WORD,
    NAMED_SECRET,
    SECRET_VALUE,
    WEBHOOK,
)

# What the shell puts in itself when the command runs: $NAME, ${NAME…}, $(cat file), `cat file`.
FILLED_IN = re.compile(r"\$\w+|\$\{[^}]*\}|\$\([^)]*\)|`[^`]*`")
MARK = "$V"
HARMLESS = re.compile(r"""["']?(?:(?:Bearer|Basic|token)\s*)?(?:\$V\S{0,2}|)["']?""", re.IGNORECASE)
# Addresses whose path alone lets everybody in, beside those of training.core.redact.
OPEN_ADDRESS = re.compile(
    r"https?://[^\s\"']*?(?:/(?:web)?hooks?/|/services/|/bot|(?<=//)api\.day\.app/|/with/key/)[^\s\"'$/?]{8,}"
)
IDENTITY = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE)
LOGIN = re.compile(
    r"(?:^|\s)(?:(?:-u|--user)[= ]?[\"']?[^\s\"':]+:|--oauth2-bearer[= ][\"']?|sshpass -p "
    r"?[\"']?|-xp [\"']?)([^\s\"']+)"
)
FIX = (
    """--notify='curl -H "Authorization: Bearer $NTFY_TOKEN" …'   """
    "# after: export NTFY_TOKEN=…; mind the single quotes"
)


def problems(command: str, origin: str) -> list[Problem]:
    """One when something in `command` looks like a key, a password or an address that is one."""
    found = first(command)
    if not found:
        return []
    what = (
        f"notify ({origin}) holds what looks like a secret, {found}: plan.json, the log and "
        f"the "
        f"list of processes would show it"
    )
    return [
        Problem(
            "secret.in_config",
            what,
            "secrets in variables, that the command names in single quotes",
            [FIX],
        )
    ]


def first(command: str) -> str:
    """How the first secret can be recognised, without showing it; '' when there is none."""
    text = FILLED_IN.sub(MARK, command)
    for found in NAMED_SECRET.finditer(text):
        name, value = found[1].strip(" \t\"'=:;|&("), found[2]
        # 'the key turned out …' is a sentence
        says_so = any(c in found[1] for c in "=:") or name.startswith("-")
        if (
            says_so
            and not HARMLESS.fullmatch(value)
            and not name.lower().endswith(("file", "path"))
        ):
            return f"after {name!r}"
    for found in LOGIN_IN_ADDRESS.finditer(text):
        if not found[0].removesuffix("@").rpartition(":")[2].startswith(MARK):
            return "a password in an address"
    for found in LOGIN.finditer(text):
        if not found[1].startswith(MARK):
            return "a password after --user"
    for pattern in (WEBHOOK, OPEN_ADDRESS):
        for found in pattern.finditer(text):
            if MARK not in found[0]:
                return "an address that anybody who knows it can post to"
    if CLOUD_KEY.search(text) or IDENTITY.search(text):
        return "a key by its form"
    return (
        "a key by its form"
        if any(SECRET_VALUE.search(word[0]) for word in LONG_WORD.finditer(text))
        else ""
    )
