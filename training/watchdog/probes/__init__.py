"""Observation of running ranks from outside: processes, stacks, sockets, collectives."""
