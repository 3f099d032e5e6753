"""Health check of a running job from outside: are all its ranks training? No torch here.

options          command line
target           the ranks' processes, how many are expected, and their run
activity         two observations of each rank, a moment apart
progress_checks  does every rank make progress? decides the answer
gpu_placement    which rank computes on which GPU
run_checks       checks of the run directory: data, parameters, loss, speed, memory, checkpoint,
                 findings
logs             log of a training that has no run directory
rank_table       table of the ranks
check            one check with its status and evidence
health           all checks → YES, NO, UNKNOWN or IT HAS ENDED, and the exit status
render           one screen, or JSON
"""
