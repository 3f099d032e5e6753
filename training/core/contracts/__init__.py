"""The records that stages hand to each other, field by field: what a file of the run directory
holds, with units and ranges.

Types only: at run time each record is the plain dict that JSON has. A reader narrows what it finds
in a file once (training.core.run_reader); from there on mypy checks every key. The heartbeat is
binary: training.core.heartbeat.HeartbeatRecord.
"""
