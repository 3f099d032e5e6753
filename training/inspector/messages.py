"""`msg` of training/core/messages.py. It is loaded from its file, because this package imports no
other of this project (see __init__.py)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

_FILE = Path(__file__).resolve().parents[1] / "core" / "messages.py"
_spec = importlib.util.spec_from_file_location("duet_messages", _FILE)
assert _spec and _spec.loader
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

msg: Callable[..., str] = _module.msg
