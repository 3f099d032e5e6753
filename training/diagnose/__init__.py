"""What went wrong, from logs: ours or anybody's, alive or ended. No torch here.

signatures/    what is known of failures: data
source         a log as it lies on the disk; scan: where in it anything stands that is worth reading
log_line, progress_marks, traceback, log_analysis   what one log tells around those places
root_cause     which of it is the cause
log_parsers/   the figures of a training, from its log alone
"""
