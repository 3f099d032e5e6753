"""The monitor: reads a run directory and the machine, shows both, writes nothing. No torch here.

options       command line, and which run it selects
history       metrics.jsonl → last values, speed, curves
host_stats    processes, CPU, memory, disks, GPUs
run_status    status of a run and its reason
rank_states   heartbeat and process of each rank
run_figures   progress, training figures, curves, newest checkpoint
state         everything about a run at one moment as one plain dict, which --json prints
alerts        conditions in that dict that need attention
log_watch     the same dict for a log that Duet's launcher did not write
run_list      all runs, and their table
term_text     text in cells: bars, curves, widths, colours
screen        the dict as a screen of a given size, or as one line
sections      its parts other than tables
tables        its tables: ranks, GPUs, system
pages         other pages: log, diagnosis, GPU details, help
terminal      modes, keys, signals, painting
live          the live view; lines of text without a terminal
prom_metrics  Prometheus metrics: names, labels, help
prom_samples  their samples, from the dicts of one or several runs
prometheus    --prometheus: HTTP endpoint for a Prometheus server
attach        where each rank of any training is now
health/       health check: are all ranks training?
report/       one or several runs as one HTML file
"""
