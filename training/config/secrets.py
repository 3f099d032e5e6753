"""Detection of secrets in the --notify command, which is visible in plan.json, the log and the
process list."""

from __future__ import annotations

import re

from training.core.errors import Problem
from training.core.messages import msg
from training.core.redact import (
    CLOUD_KEY,
    LOGIN_IN_ADDRESS,
    LONG_WORD,
    NAMED_SECRET,
    SECRET_VALUE,
    WEBHOOK,
)

# Expansions by the shell: $NAME, ${NAME…}, $(cat file), `cat file`.
FILLED_IN = re.compile(r"\$\w+|\$\{[^}]*\}|\$\([^)]*\)|`[^`]*`")
MARK = "$V"
HARMLESS = re.compile(r"""["']?(?:(?:Bearer|Basic|token)\s*)?(?:\$V\S{0,2}|)["']?""", re.IGNORECASE)
# Addresses whose path is the secret, besides those of training.core.redact.
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
    "# after: export NTFY_TOKEN=…; note the single quotes"
)


def problems(command: str, origin: str) -> list[Problem]:
    """One problem if `command` contains what looks like a key, a password or a secret address."""
    found = first(command)
    if not found:
        return []
    what = msg("config.secrets.found", origin=origin, found=found)
    return [
        Problem(
            "secret.in_config",
            what,
            msg("config.secrets.allowed"),
            [FIX],
        )
    ]


def first(command: str) -> str:
    """Description of the first secret without its value; '' if there is none."""
    text = FILLED_IN.sub(MARK, command)
    for found in NAMED_SECRET.finditer(text):
        name, value = found[1].strip(" \t\"'=:;|&("), found[2]
        # 'the key turned out …' is a sentence.
        assigned = any(c in found[1] for c in "=:") or name.startswith("-")
        if (
            assigned
            and not HARMLESS.fullmatch(value)
            and not name.lower().endswith(("file", "path"))
        ):
            return msg("config.secrets.after", name=name)
    for found in LOGIN_IN_ADDRESS.finditer(text):
        if not found[0].removesuffix("@").rpartition(":")[2].startswith(MARK):
            return msg("config.secrets.password_in_address")
    for found in LOGIN.finditer(text):
        if not found[1].startswith(MARK):
            return msg("config.secrets.password_after_user")
    for pattern in (WEBHOOK, OPEN_ADDRESS):
        for found in pattern.finditer(text):
            if MARK not in found[0]:
                return msg("config.secrets.open_address")
    if CLOUD_KEY.search(text) or IDENTITY.search(text):
        return msg("config.secrets.key_format")
    return (
        msg("config.secrets.key_format")
        if any(SECRET_VALUE.search(word[0]) for word in LONG_WORD.finditer(text))
        else ""
    )
