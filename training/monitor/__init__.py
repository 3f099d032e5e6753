"""The monitor: reads a run directory and the machine, shows both, writes nothing. No torch here.

options   the command line, and which run it means
history     metrics.jsonl → last values, speed, curves
host_stats  processes, CPU, memory, disks, GPUs
state       everything about a run at one moment, as one plain dict: what --json prints
alerts      what of it needs attention
log_watch   the same dict of a log that no launcher of ours made
run_list    all runs, and their table
term_text   text in cells: bars, curves, widths, colours
screen      the dict as a screen of a given size, or as one line
sections    its parts that are no tables
tables      its tables: ranks, GPUs, system
pages       what else can be shown: log, diagnosis, GPU details, help
terminal    the terminal itself: modes, keys, signals, painting
live        the live view; lines where there is no terminal
prom_metrics  the dict as samples with names, units and labels
prometheus  --prometheus: answers a Prometheus server
attach      where each rank of any training is, now
health/     are all ranks training? Asked once
report/     a run, or several, as one HTML file
"""
