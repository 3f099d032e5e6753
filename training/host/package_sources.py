"""Where pip and uv take packages from: variables and pip's files. Standard library only: also used
before anything is installed."""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from pathlib import Path

SOURCES = ("INDEX", "INDEX_URL", "FIND_LINKS")  # ends of variables of pip and uv
# setting of pip → variable of uv and what separates its values; UV_DEFAULT_INDEX is of uv 0.4.23
UV_VARIABLES = {
    "index-url": ("UV_INDEX_URL", " "),
    "extra-index-url": ("UV_EXTRA_INDEX_URL", " "),
    "find-links": ("UV_FIND_LINKS", ","),
}


def other_sources(environ: Mapping[str, str]) -> bool:
    """Whether packages may come from elsewhere than PyPI."""
    own = [name for name, value in environ.items() if value and name.startswith("UV_")]
    return any(uv_sources(environ)) or any(name.endswith(SOURCES) for name in own)


def uv_sources(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """pip's package sources as variables and options of uv, since uv does not read pip's settings;
    none where uv has its own. Variables: every user of the machine can read a command line, and an
    address may hold a password."""
    if any(name.startswith("UV_") and name.endswith(SOURCES) for name in environ):
        return {}, []
    found: dict[str, str] = {}
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 – Path.home raises without a home
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    files = [
        Path("/etc/xdg/pip/pip.conf"),
        Path("/etc/pip.conf"),
        home / ".pip/pip.conf",
        config / "pip/pip.conf",
    ]
    if own := environ.get("PIP_CONFIG_FILE"):
        files = [] if own == os.devnull else [*files, Path(own)]
    parser = configparser.RawConfigParser()
    try:
        parser.read(files, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):  # pip would refuse this file
        return {}, []
    for section in filter(parser.has_section, ("global", "install")):
        found |= {name.replace("_", "-"): value for name, value in parser[section].items()}
    found |= {
        name[4:].lower().replace("_", "-"): value
        for name, value in environ.items()
        if name.startswith("PIP_")
    }
    variables = {
        variable: separator.join(found[name].split())
        for name, (variable, separator) in UV_VARIABLES.items()
        if found.get(name, "").split()
    }
    closed = found.get("no-index", "").lower() in ("1", "true", "yes", "on")
    options = ["--no-index"] if closed else []
    if variables or options:  # pip searches all, uv by default only the first that has the package
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return variables, options
