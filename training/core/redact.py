"""Redaction of secrets, and, for texts that leave the machine, of names of users, hosts and home
folders."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from training.core.jsonl import dig
from training.core.messages import msg
from training.core.plain_text import one_line

HIDDEN = msg("core.redact.hidden")
# keys of attention: key_offset, num_key_value_heads
_OF_A_MODEL = (
    r"(?![_-](?:offset|values?|dims?|size|heads?|bias|norm|len|length|proj|padding)(?:[_-]|\b))"
)
SECRET_NAME = re.compile(
    rf"(^|[_-])(api_?key|key{_OF_A_MODEL}|token|secret|passwd|password|credentials?|auth)([_-]|$)",
    re.IGNORECASE,
)
# Never shown, unlike --pad_token_id=0 and --auth=auto.
PASSWORD = re.compile(r"secret|passw|credential", re.IGNORECASE)
# unlike the image_key and pad_token of a task
API_KEY = re.compile(r"(^|[_-])(api[_-]?key|auth)([_-]|$)", re.IGNORECASE)
SETTING = re.compile(
    r"true|false|auto|default|[+-]?\d{1,5}(\.\d{1,4})?(e[+-]?\d{1,2})?", re.IGNORECASE
)
# imagenet21k, camera2, 2024, 336px, conv2d, 1x1, 512x512
WORD = re.compile(r"[^\W\d]*\d{0,5}(?:[^\W\d]|px|bit|d[^\W\d]*|x\d{1,4}|x[a-z]+)?")
NAME = re.compile(r"[A-Z]?[a-z]{2,}")
COMPOUND = re.compile(r"\d{0,4}[^\W\d]{0,8}\d{0,4}[^\W\d]{0,8}")  # 4xRGB16bit, x4plus
SECRET_VALUE = re.compile(
    r"""^[0-9a-f]{40}$                                        # a W&B key of the older form
    | ^(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9_]{32,}$            # long, letters and digits, no path
    | ^(sk|hf|gh[a-z]|github|glpat|wandb|xox[a-z])[-_][\w-]{16,} # prefix of a service
    """,
    re.VERBOSE,
)
# with a password, or a token in the place of the user; up to the first colon, which is linear
LOGIN_IN_ADDRESS = re.compile(r"://(?:[^/\s@:]*:[^/\s@]*|[^/\s@]{20,})@")
NAMED_SECRET = re.compile(
    r"""((?:^|[^A-Za-z])(?:[\w-]{0,64}[_-])?(?:api[_-]?key|key"""
    + _OF_A_MODEL
    + r"""|token|secret|passwd|password|credential|auth|authorization)(?:[_-]\w{1,20})?
        ["']?\s*(?:=|:|\ (?=\S+$)|\ (?=\S+\ ))\s*)            # its name and the separator
    ("[^"]*"|'[^']*'|(?:Bearer\s+|Basic\s+)?[^\s"',;]{6,})""",
    re.IGNORECASE | re.VERBOSE,
)
WEBHOOK = re.compile(
    r"(https?://(?:hooks\.|discord(?:app)?\.com/api/webhooks|[\w.]+/webhook)[^\s\"']{0,16})[^\s\"']*"
)
# The limit and the look-behind keep long words linear: a log may have a megabyte without a space.
MAIL = re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
ADDRESS = re.compile(r"\b(?!127\.|0\.0\.0\.0)(?:\d{1,3}\.){3}\d{1,3}\b(?!\.\d)")
CLOUD_KEY = re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b")
LONG_WORD = re.compile(r"[A-Za-z0-9_-]{20,}")
# another user's process, with its user and command: `pid 4711 (alice): python …`; in Chinese
# messages the parenthesis is a full-width one
STRANGER = re.compile(r"(\bpid \d+)(?: \(|\uff08).*", re.DOTALL)

# not replaced as the name of a machine: it does not identify one, and occurs as a word in logs
COMMON = re.compile(r"[A-Za-z]{0,4}|localhost|127(\.\d+){3}")


def is_secret(name: str, value: str) -> bool:
    return bool(value) and (_is_named(name, value) or _has_form(value))


def _is_named(name: str, value: str) -> bool:
    """Whether this is the name of a secret, and the value not that of a setting."""
    setting = SETTING.fullmatch(value) and not PASSWORD.search(name)
    return bool(SECRET_NAME.search(name)) and not setting


def is_surely_secret(name: str, value: str) -> bool:
    """Whether the value must not be published, even if a task needs it: `*_key` and `*_token` alone
    are names of ordinary options, unless the value looks random."""
    named = _is_named(name, value) and (API_KEY.search(name) or _is_random(value))
    return bool(value) and bool(PASSWORD.search(name) or named or _has_form(value))


def _has_form(value: str) -> bool:
    """Whether the value is a secret whatever its name is."""
    return any(form.search(value) for form in (SECRET_VALUE, LOGIN_IN_ADDRESS, CLOUD_KEY))


def _is_random(value: str) -> bool:
    """Long, and neither a path nor made of words and numbers, as `<extra_id_99>` is."""
    parts = [part for part in re.split(r"[\W_]+", value) if part]
    path = value.startswith(("/", "~", "./", "../")) or ("/" in value and _are_names(parts))
    return len(value) >= 12 and not path and not all(map(WORD.fullmatch, parts))


def _are_names(parts: list[str]) -> bool:
    """Whether half of the parts are plain words and the others short, as in `data/4xRGB16bit`."""
    known = all(WORD.fullmatch(part) or COMPOUND.fullmatch(part) for part in parts)
    return known and 2 * sum(map(bool, map(NAME.fullmatch, parts))) >= len(parts)


def shown(name: str, value: str) -> str:
    """The value of a variable as it may be shown or written."""
    return HIDDEN if is_secret(name, value) else value


def word(text: str) -> str:
    """Redact one word of a command line: `--name=value`, or a value alone."""
    name, equals, value = text.partition("=")
    if not equals:
        return "…" if is_secret("", text) else text
    return f"{name}=…" if is_secret(name.lstrip("-"), value) else text


def words(texts: Iterable[str]) -> list[str]:
    """Redact a command line; also the word after `--name`, if the name is that of a secret."""
    found, name = [], ""
    for text in texts:
        flag = text.startswith("-")
        found.append("…" if not flag and text and _is_named(name, text) else word(text))
        name = text.lstrip("-") if flag and "=" not in text else ""
    return found


def joined(texts: Iterable[str]) -> str:
    """A command line to paste, redacted; an omitted value needs no quotes."""
    return " ".join(
        one if _is_plain(one.replace("…", "x")) else shlex.quote(one) for one in words(texts)
    )


def running(command: str, most: int) -> str:
    """The start of the command line of a process, which has spaces between its words, redacted."""
    return " ".join(words(one_line(command).split(" ")))[:most]


def _is_plain(text: str) -> bool:
    return shlex.quote(text) == text


def masked(text: str) -> str:
    """Redact a log line: anything that looks like a key by name or form, email and IP addresses."""
    text = NAMED_SECRET.sub(r"\1…", LOGIN_IN_ADDRESS.sub("://…@", WEBHOOK.sub(r"\1…", text)))
    text = ADDRESS.sub("IP", MAIL.sub("MAIL", CLOUD_KEY.sub("…", text)))
    return LONG_WORD.sub(lambda word: "…" if SECRET_VALUE.search(word[0]) else word[0], text)


def masked_values(value: Any, name: str = "") -> Any:
    """`masked` for every string of a JSON value; keys and other types are kept."""
    if isinstance(value, dict):
        return {key: masked_values(one, str(key)) for key, one in value.items()}
    if isinstance(value, list):
        if all(isinstance(one, str) for one in value):  # may be the words of a command line
            value = words(value)
        return [masked_values(one, name) for one in value]
    if not isinstance(value, str):
        return value
    return "…" if len(value.split()) == 1 and _is_named(name, value) else masked(value)


def machines_of(plan: Mapping[str, Any]) -> list[str]:
    """The machines that a plan names, as `[user@]host`."""
    listed = str(dig(plan, "config", "hosts") or "")
    others = [dig(plan, "place", "master_addr"), dig(plan, "starter", "host")]
    # the port of `host:22` and `[fe80::1]:22`, not the end of a bare fe80::1
    port = re.compile(r"^((?:[^@]*@)?(?:[^:@]*|\[.*\])):\d{1,5}$")
    hosts = [re.sub(r"[][]", "", port.sub(r"\1", one.strip())) for one in listed.split(",")]
    return hosts + [one for one in others if isinstance(one, str)]


class Anonymous:
    """Replaces home folders by `~`, user names by `USER` and host names by `HOST` in a text.
    `logins`: of other machines, as in `machines_of`."""

    def __init__(self, environ: Mapping[str, str] = os.environ, logins: Iterable[str] = ()) -> None:
        users, homes = {environ.get("USER"), environ.get("LOGNAME")}, {environ.get("HOME")}
        try:
            entry = pwd.getpwuid(os.getuid())
        except KeyError:  # a container whose user ID has no name
            pass
        else:
            users.add(entry.pw_name)
            homes.add(entry.pw_dir)
        homes |= {os.path.realpath(h) for h in homes if h}
        host = socket.gethostname()
        hosts = {host, host.split(".")[0], environ.get("HOSTNAME")}
        for user, _, other in (login.rpartition("@") for login in logins):
            short = other if ADDRESS.fullmatch(other) else other.split(".")[0]
            users.add(user)
            hosts |= {name for name in (other, short) if not COMMON.fullmatch(name)}
        # Longest first: a home folder inside another one, a host with its domain.
        self._homes = sorted(
            (h.rstrip("/") for h in homes if h and Path(h).is_absolute() and h != "/"),
            key=len,
            reverse=True,
        )
        marks = {n: "USER" for n in users if n and n != "root"} | {
            n: "HOST" for n in hosts if n and n != "localhost"
        }
        self._names = [
            (re.compile(rf"(?<![\w.-]){re.escape(n)}(?![\w-])"), marks[n])
            for n in sorted(marks, key=lambda n: (-len(n), n))
        ]

    def __call__(self, text: str) -> str:
        text = STRANGER.sub(r"\1 …", text)
        for home in self._homes:
            text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
        text = re.sub(r"(/home/|/Users/|[A-Z]:\\Users\\)[^/\s\\]+", r"\1USER", text)
        for pattern, mark in self._names:
            text = pattern.sub(mark, text)
        return LOGIN_IN_ADDRESS.sub("://…@", text)

    def command(self, script: str, args: Iterable[str]) -> str:
        return self(joined([script, *args]))
