"""Enumerations used in records."""

from __future__ import annotations

from typing import Any, Literal

# found by a watchdog while all ranks are alive
HangKind = Literal["hang", "stopped", "blocked", "desync", "uneven"]
ExitKind = Literal["died", "error", "desync", "uneven"]  # of a rank that has ended
PeerKind = Literal["silent", "gone"]  # of another machine
# 'asked': the run was stopped on request
FailureKind = HangKind | ExitKind | PeerKind | Literal["asked"]
VerdictKind = HangKind | ExitKind | PeerKind

PlaceKind = Literal["local", "node", "rank"]  # local and node start ranks; rank is one of them
CheckStatus = Literal["ok", "warning", "error"]
SummaryStatus = Literal["done", "stopped", "finished"]  # 'finished' is a script's 'done'
# 'silent': only of a foreign log
RunStatus = Literal["starting", "running", "finished", "stopped", "failed", "died", "silent"]
# 'left': this machine has left the run, and may not know whether others continue it
NotifyStatus = Literal["finished", "failed", "stopped", "preempted", "left"]

# Configuration fields or task options, by name. Their types, units and ranges are defined in
# training.config.schema and in the options of the task, which this package does not import.
FieldValues = dict[str, Any]
