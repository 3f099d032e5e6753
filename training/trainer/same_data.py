"""Comparison of the data on several machines: each prepares its own copy, and an older file on one
of them would silently train another model."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, cast

from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.inspector.distributed import exchange_texts, from_main
from training.tasks.base import Task

if TYPE_CHECKING:
    from training.core.contracts.run_files import ManifestRecord


def check(task: Task, facts: ManifestRecord) -> None:
    """Compare data and tokenizer of this rank with rank 0's; all ranks must call it. Raises
    UserError on every rank, with the machines that differ."""
    first = cast("ManifestRecord", json.loads(from_main("data", json.dumps(facts))))
    same = task.same_data(first) and first["tokenizer"] == facts["tokenizer"]
    hosts = exchange_texts("data", "" if same else socket.gethostname(), everybody=True)
    # with its own same_data(), facts that JSON changes, such as tuples, may differ from themselves
    comparable = not hosts[0]
    if comparable and (different := sorted({host for host in hosts if host})):
        what = msg("trainer.data.differs", hosts=", ".join(different))
        raise UserError(Problem("data.differs", what, msg("trainer.data.same_wanted")))
