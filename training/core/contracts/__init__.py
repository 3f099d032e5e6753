"""Schemas of the records in the run directory, with units and ranges.

Types only: at run time a record is the plain dict of its JSON. Readers narrow the contents of a
file once (training.core.run_reader); after that mypy checks every key. The heartbeat is binary:
training.core.heartbeat.HeartbeatRecord.
"""
