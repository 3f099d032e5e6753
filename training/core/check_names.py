"""Names of the preflight checks for people."""

from __future__ import annotations

import re

from training.core.messages import msg


def check_title(name: str) -> str:
    """The name of a check for people; codes and JSON have the English one."""
    if gpu := re.fullmatch(r"GPU (\S+) state", name):
        return msg("core.check.gpu_state", gpu=gpu[1])
    known = {
        "GPU links": msg("core.check.gpu_links"),
        "clock": msg("core.check.clock"),
        "communication": msg("core.check.communication"),
        "data": msg("core.check.data"),
        "host memory": msg("core.check.host_memory"),
        "host name": msg("core.check.host_name"),
        "log folder": msg("core.check.log_folder"),
        "machine": msg("core.check.machine"),
        "memory of a step": msg("core.check.memory_of_a_step"),
        "open files": msg("core.check.open_files"),
        "port": msg("core.check.port"),
        "precision": msg("core.check.precision"),
        "run": msg("core.check.run"),
        "run folder": msg("core.check.run_folder"),
        "torch build": msg("core.check.torch_build"),
        "torch kernels": msg("core.check.torch_kernels"),
        "versions": msg("core.check.versions"),
    }
    return known.get(name, name)
