"""W&B mode of a run, from the configuration and the login on this machine."""

from __future__ import annotations

import os

from training.config.schema import Config
from training.core.messages import msg
from training.host.decisions import AS_ASKED


def wandb_mode(config: Config, key: str | None = None) -> tuple[str, str]:
    """(mode, reason); wandb is not imported for 'disabled'. `key`: from the option file."""
    if config.use_dummy_wandb:
        return "disabled", "dummy"
    if config.wandb_mode != "auto":
        return config.wandb_mode, AS_ASKED
    if key or os.environ.get("WANDB_API_KEY") or _netrc_has_wandb():
        return "online", msg("host.wandb.logged_in")
    return "disabled", msg("host.wandb.no_login")


def _netrc_has_wandb() -> bool:
    import netrc

    try:
        return any("wandb" in host for host in netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        return False
