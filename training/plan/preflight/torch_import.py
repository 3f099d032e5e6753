"""Whether the installed torch is new enough, and for --check, which needs it to measure, whether it
can be imported."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping

from training.core.messages import msg
from training.core.project import ROOT
from training.host import packages, torch_build
from training.host.torch_build import TorchBuild
from training.plan.preflight.report import ERROR, Check
from training.plan.request import LaunchRequest


def too_old(torch: TorchBuild | None, request: LaunchRequest) -> list[Check]:
    """For a training of Duet. An environment has a newer torch, unless a variable selects another
    one, as PYTHONPATH in the images of some clouds, or another launcher has started the ranks."""
    if torch is None or torch.number is None or torch.number >= torch_build.OLDEST:
        return []
    oldest = ".".join(map(str, torch_build.OLDEST))
    text = msg("plan.torch.too_old", name=f"torch {torch.version}", oldest=oldest)
    return [Check("torch", ERROR, text, [fix(torch, request, os.environ, sys.prefix, oldest)])]


def failure(request: LaunchRequest) -> Check | None:
    """The error of `import torch` in this process; None if it works, or without torch."""
    build = torch_build.installed()
    if build is None:
        return None
    try:
        import torch  # noqa: F401
    except Exception as error:  # of the dynamic linker, or of whatever torch imports
        why = (str(error) or type(error).__name__).splitlines()[0]
        text = msg("plan.torch.cannot_import", name=f"torch {build.version}", why=why)
        return Check("torch", ERROR, text, [fix(build, request, os.environ, sys.prefix)])
    return None


def fix(
    build: TorchBuild,
    request: LaunchRequest,
    environ: Mapping[str, str],
    prefix: str,
    oldest: str = "",
) -> str:
    """The command that uses another torch if a variable selects this one, else one that installs
    it again. `prefix`: sys.prefix. `oldest`: version of which it is to be at least."""
    if name := torch_build.chosen_by(build, environ):
        return f"env -u {name} {request.command()}"
    if prefix == str(ROOT / ".venv"):
        return f"rm -r {shlex.quote(prefix)}; {request.command()}"
    if oldest:
        return packages.install([f"torch>={oldest}"])
    number = re.match(r"\d+(\.\d+)*", build.version)  # without +cu130, which PyPI does not have
    wanted = f"torch=={number[0]}" if number else "torch"
    return shlex.join([*packages.installer(), "--force-reinstall", wanted])
