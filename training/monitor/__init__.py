"""The monitor: reads a run directory and the machine, shows both, writes nothing. No torch here.

options   the command line, and which run it means
records   a growing .jsonl file, read piece by piece
history   metrics.jsonl → last values, speed, loss curve
machine   processes, CPU, memory, disks, GPUs
state     everything about a run at one moment, as one plain dict: what --json prints
draw      text in cells: bars, curves, widths, colours
screen    that dict as a screen of a given size, or as one line
tables    its tables: ranks, GPUs, system
terminal  the live view: repaint, keys, signals
"""
