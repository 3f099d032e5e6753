"""preflight.json: the resource report of a start."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from training.core.contracts.kinds import CheckStatus

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class CheckRecord(TypedDict):
    """A line of the resource report (preflight.json)."""

    code: NotRequired[str]  # docs/codes.md; missing in early 0.1
    name: str
    status: CheckStatus
    text: str
    fixes: list[str]  # commands


class PreflightRecord(TypedDict):
    """preflight.json."""

    checks: list[CheckRecord]
