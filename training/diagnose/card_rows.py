"""Rows of the failure card, and the same in logs."""

from __future__ import annotations

import re

from training.core import messages
from training.core.cells import pad

COLUMN = 11  # cells
QUOTED = "      │ "  # before evidence


def row(label: str, text: str) -> str:
    """A label and its text in two columns, aligned for double-width characters too."""
    return pad(label + " ", COLUMN) + text


def in_logs(label: str) -> str:
    """Regex for the start of a row: its label, by message ID, in any language."""
    labels = messages.templates("diagnose")[label].values()
    return f"(?:{'|'.join(re.escape(row(one, '')) for one in labels)})"
