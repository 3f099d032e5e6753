"""What went wrong, from logs: ours or anybody's, alive or ended. No torch here.

signatures/    what is known of failures: data
source         a log as it lies on the disk; scan: where in it anything stands that is worth reading
log_line, progress_marks, traceback, log_analysis   what one log tells around those places
events         what of it may be the cause; survived: what training went on after
root_cause     which of it is the cause; guilty_rank: of which rank
log_parsers/   the figures of a training, from its log alone
"""
