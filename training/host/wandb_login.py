"""W&B mode of a run, from the configuration and the login on this machine."""

from __future__ import annotations

import configparser
import os
from urllib.parse import urlsplit

from training.config.schema import Config
from training.core.find_run import path_of
from training.core.messages import msg
from training.host.decisions import AS_ASKED

CLOUD = "https://api.wandb.ai"


def wandb_mode(config: Config, key: str | None = None) -> tuple[str, str]:
    """(mode, reason); wandb is not imported for 'disabled'. `key`: from the option file."""
    if config.use_dummy_wandb:
        return "disabled", "dummy"
    if config.wandb_mode != "auto":
        return config.wandb_mode, AS_ASKED
    if key or os.environ.get("WANDB_API_KEY") or _in_netrc():
        return "online", msg("host.wandb.logged_in")
    return "disabled", msg("host.wandb.no_login")


def netrc_file() -> str:
    """Where wandb looks for a login: $NETRC, or in the home folder."""
    usual = ("~/.netrc", "~/_netrc")
    found = (name for name in usual if path_of(name).exists())
    return os.environ.get("NETRC") or next(found, usual[0])


def _in_netrc() -> bool:
    """Whether there is a key for the server of W&B."""
    import netrc

    try:
        login = netrc.netrc(path_of(netrc_file())).hosts.get(_server())
    except (OSError, ValueError, netrc.NetrcParseError):
        return False
    return login is not None and bool(login[2])


def _server() -> str:
    """Host, and port if there is one."""
    return urlsplit(os.environ.get("WANDB_BASE_URL") or _chosen_server() or CLOUD).netloc


def _chosen_server() -> str:
    """Of `wandb login --host`; empty without."""
    folder = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    settings = configparser.ConfigParser(interpolation=None)
    try:
        settings.read(path_of(folder) / "settings", encoding="utf-8")
    except (OSError, ValueError, configparser.Error):
        return ""
    return settings.get("default", "base_url", fallback="")
