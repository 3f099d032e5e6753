"""'Are all my ranks training?', answered once for a job that runs, from outside and in one screen.
No torch here.

options          the command line
target           which processes are the ranks, how many there should be, which run it is
activity         two looks at each rank, a moment apart: what has changed
progress_checks  whether every rank goes on: the answer stands on it
gpu_placement    which rank computes on which GPU
run_checks       what the run directory knows: data, parameters, loss, speed, memory, checkpoint,
                 findings
logs             what the log of a training tells that tells nothing of itself
rank_table       what is told of each rank
check            one thing that was looked at, and its proof
health           all checks → YES, NO, CAN NOT TELL or HAS ENDED, and the exit status
render           one screen, or JSON
"""
