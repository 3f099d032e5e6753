"""Errors of the user's code that torch.compile reports as its own, since it runs each operator on
fake tensors first."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from traceback import FrameSummary

_OF_OPERATOR = "TorchRuntimeError"
_RAISED = re.compile(r""": got (\w+)\(('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")\)$""", re.MULTILINE)
_TRACED = "\n\nfrom user code:\n"  # begins what torch adds
_EXPLAINED = re.compile(r"^  Explanation: (.+)$", re.MULTILINE)  # of a different device


def unwrap(error: BaseException) -> tuple[str, str, Sequence[FrameSummary]]:
    """Type and message as without torch.compile, and the frames that it has traced, which are in no
    traceback."""
    name, text = type(error).__name__, str(error)
    traced: Sequence[FrameSummary] = getattr(error, "real_stack", None) or ()
    if name != _OF_OPERATOR:
        return name, text.partition(_TRACED)[0] if traced else text, traced
    if raised := _RAISED.search(text):
        return raised[1], ast.literal_eval(raised[2]), traced
    if explained := _EXPLAINED.search(text):
        return RuntimeError.__name__, explained[1], traced
    return name, text, traced
