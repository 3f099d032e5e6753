"""Where pip and uv take packages from: variables and pip's files. Standard library only: also used
before anything is installed."""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from pathlib import Path

SOURCES = ("INDEX", "INDEX_URL", "FIND_LINKS")  # ends of variables of pip and uv


def other_sources(environ: Mapping[str, str]) -> bool:
    """Whether packages may come from elsewhere than PyPI."""
    own = [name for name, value in environ.items() if value and name.startswith("UV_")]
    return bool(uv_sources(environ)) or any(name.endswith(SOURCES) for name in own)


def uv_sources(environ: Mapping[str, str]) -> list[str]:
    """pip's package sources as uv options, since uv does not read pip's settings; [] where uv has
    its own."""
    if any(name.startswith("UV_") and name.endswith(SOURCES) for name in environ):
        return []
    found: dict[str, str] = {}
    home, config = Path.home(), Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
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
        return []
    for section in filter(parser.has_section, ("global", "install")):
        found |= {name.replace("_", "-"): value for name, value in parser[section].items()}
    found |= {
        name[4:].lower().replace("_", "-"): value
        for name, value in environ.items()
        if name.startswith("PIP_")
    }
    names = {
        "index-url": "--index-url",
        "extra-index-url": "--extra-index-url",
        "find-links": "--find-links",
    }
    words = [
        f"{flag}={value}" for name, flag in names.items() for value in found.get(name, "").split()
    ]
    words += (
        ["--no-index"] if found.get("no-index", "").lower() in ("1", "true", "yes", "on") else []
    )
    # pip searches all sources, uv by default only the first that has the package
    return [*words, "--index-strategy=unsafe-best-match"] if words else []
