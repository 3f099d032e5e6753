"""Failure diagnosis from logs of Duet or any other program, of a live or an ended run. No torch.

signatures/    catalogue of known failure messages: data
source         log files as text; scan: places in them that are worth reading
log_line, log_times, progress_marks, traceback, rank_table, log_analysis
               the content of one log around those places
events         candidates for the cause; survived: failures after which training continued
root_cause     choice of the cause; consequences: events that follow from another one
guilty_rank    the rank of the cause
log_parsers/   training metrics from a log
"""
