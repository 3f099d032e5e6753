"""The words that records use for what happened: nothing else stands in these fields."""

from __future__ import annotations

from typing import Any, Literal

# found by a watch while all ranks live
HangKind = Literal["hang", "stopped", "blocked", "desync", "uneven"]
ExitKind = Literal["died", "error", "desync"]  # of a rank that has ended
PeerKind = Literal["silent", "gone"]  # of another machine
# 'asked': the run was stopped on request
FailureKind = HangKind | ExitKind | PeerKind | Literal["asked"]
VerdictKind = HangKind | ExitKind | PeerKind

Device = Literal["cpu", "cuda"]
PlaceKind = Literal["local", "node", "rank"]  # local and node start ranks, a rank is one
CheckStatus = Literal["ok", "warning", "error"]
SummaryStatus = Literal["done", "stopped", "finished"]  # 'finished' is a script's 'done'
# 'silent': of a foreign log
RunStatus = Literal["starting", "running", "finished", "stopped", "failed", "died", "silent"]
NotifyStatus = Literal["finished", "failed", "stopped", "preempted"]

# Configuration fields, or a task's options, by name. Their types, units and ranges stand in
# training.config.schema and in the options of the task, which this room does not import.
FieldValues = dict[str, Any]
