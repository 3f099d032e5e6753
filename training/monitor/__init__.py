"""The monitor: reads a run directory and the machine, shows both, writes nothing. No torch here.

options   the command line, and which run it means
records     a growing .jsonl file, read piece by piece
history     metrics.jsonl → last values, speed, curves
machine     processes, CPU, memory, disks, GPUs
state       everything about a run at one moment, as one plain dict: what --json prints
alerts      what of it needs attention
foreign/    the same dict of a log that no launcher of ours made
fleet       all runs, and their table
draw        text in cells: bars, curves, widths, colours
screen      the dict as a screen of a given size, or as one line
sections    its parts that are no tables
tables      its tables: ranks, GPUs, system
pages       what else can be shown: log, diagnosis, GPU details, help
terminal    the terminal itself: modes, keys, signals, painting
live        the live view; lines where there is no terminal
metrics     the dict as samples with names, units and labels
prometheus  --prometheus: answers a Prometheus server
"""
