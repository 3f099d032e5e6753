"""Ranks of Duet's training that ignore a request to stop: what they do, before they are killed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from training.core import heartbeat, rundir
from training.core.heartbeat import HeartbeatRecord
from training.watchdog import culprit, hang_dump
from training.watchdog.hang_report import HangFinding
from training.watchdog.probes import snapshot


def find(run: rundir.RunDir, beats: Sequence[HeartbeatRecord]) -> HangFinding | None:
    """The rank that the others wait for, with the stacks of all; None: all have exited. Unlike a
    hang it may only be slow: the request to stop ends the run, not this. Takes about half a second,
    a few seconds when ranks do not answer."""
    working = [beat for beat in beats if beat.phase != heartbeat.FINISHED]
    everything = snapshot.gather(run, working, {beat.rank: beat.pid for beat in working})
    seen = [e for e in everything if not e.process.gone]
    if not seen:
        return None
    snapshot.complete(run, seen)
    found = culprit.find_culprit(seen)
    phase = next((str(e.beat) for e in seen if e.rank == found.rank), None)
    return hang_dump.keep_stacks(run, replace(found, phase=phase), snapshot.texts(seen))
