"""For the tests of the shell parts."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator

import pytest

from tests.conftest import GONE_WITHIN_S, processes, wait_until


@pytest.fixture(scope="module")
def module_token() -> Iterator[str]:
    """Like `token`, for processes that the tests of a module share."""
    value = uuid.uuid4().hex
    yield value
    try:
        wait_until(lambda: not processes(value), GONE_WITHIN_S, "every process of these tests has ended")
    finally:
        for pid in processes(value):
            os.kill(pid, signal.SIGKILL)
