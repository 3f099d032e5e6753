"""Checks of the data files and of W&B."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from training.config.schema import Config
from training.core.messages import msg
from training.core.plain_text import one_line
from training.core.units import plural
from training.host import packages
from training.plan.preflight.report import DATA, ERROR, OK, WANDB, WARNING, Check

DATA_LIMIT_S = 0.4
FIRST_BYTES = 4096
NAMED = 3  # most unreadable files to name
BEGINNINGS = {
    ".gz": (b"\x1f\x8b",),
    ".parquet": (b"PAR1",),
    ".zst": (b"\x28\xb5\x2f\xfd", b"\x2a\x4d\x18"),
}


def data(files: Sequence[Path], asked: str) -> Check:
    """Every file opens and starts with the signature of its format."""
    end = time.monotonic() + DATA_LIMIT_S
    bad, looked = [], 0
    for file in files:
        if problem := _problem(file):
            bad.append(f"{one_line(str(file))}: {problem}")
        looked += 1
        if time.monotonic() > end:
            break
    much = plural(len(files), "file")
    if bad:
        more = msg("plan.data.more", count=len(bad) - NAMED) if len(bad) > NAMED else ""
        fix = (
            msg("plan.data.recreate_one", data=one_line(asked))
            if len(bad) == 1
            else msg("plan.data.recreate", data=one_line(asked))
        )
        return Check(
            DATA,
            ERROR,
            msg(
                "plan.data.unreadable",
                count=len(bad),
                files=much,
                shown=msg("plan.word.semicolon").join(bad[:NAMED]),
                more=more,
            ),
            [fix],
        )
    if looked < len(files):
        return Check(
            DATA,
            OK,
            msg("plan.data.first_readable", looked=looked, files=much, limit=DATA_LIMIT_S),
        )
    return Check(DATA, OK, msg("plan.data.readable", files=much))


def _problem(file: Path) -> str:
    """Why the start of a file is invalid; '' if it is valid."""
    try:
        with file.open("rb", buffering=0) as content:
            begin = content.read(FIRST_BYTES)
    except OSError as error:
        return error.strerror or str(error)
    wanted = BEGINNINGS.get(file.suffix, ())
    # A .zst file may begin with a skippable frame, whose first byte varies.
    if not wanted or any(begin.startswith(w) or (len(w) == 3 and begin[1:4] == w) for w in wanted):
        return ""
    return msg("plan.data.not_its_format", suffix=file.suffix) if begin else msg("plan.data.empty")


def wandb(config: Config, key: str | None = None) -> Check:
    """The mode of W&B and whether there is a login; never shows the key. `key`: from the config
    file."""
    from training.host.wandb_login import netrc_file, wandb_mode

    mode, reason = wandb_mode(config, key)
    logged_in = (
        wandb_mode(replace(config, use_dummy_wandb=False, wandb_mode="auto"), key)[0] == "online"
    )
    in_netrc = msg("plan.wandb.login_netrc", file=netrc_file())
    by_file = msg("plan.wandb.key_in_config") if key else in_netrc
    login = msg("plan.wandb.login_variable") if os.environ.get("WANDB_API_KEY") else by_file
    if mode == "disabled":
        return Check(WANDB, OK, msg("plan.wandb.not_used", reason=reason))
    if packages.lacking(["wandb"]):
        fixes = [packages.install(["wandb"]), "--wandb_mode=disabled"]
        return Check(
            WANDB, WARNING, msg("plan.wandb.not_installed", mode=mode, reason=reason), fixes
        )
    if mode == "offline":
        return Check(
            WANDB,
            OK,
            msg("plan.wandb.offline", reason=reason, project=config.wandb_project),
        )
    if not logged_in:
        text = msg("plan.wandb.no_login", reason=reason)
        return Check(WANDB, WARNING, text, ["wandb login", "--wandb_mode=offline"])
    return Check(WANDB, OK, msg("plan.wandb.online", project=config.wandb_project, login=login))
