"""What went wrong, from logs: ours or anybody's, alive or ended. No torch here.

catalogue   what is known of failures: data
source      a log as it lies on the disk; scan: where in it anything stands that is worth reading
line, progress, traceback, story   what one log tells around those places
judge       which of it is the cause
"""
