"""A log that no launcher of ours made: what its lines tell of a training, shown like a run. No
torch here.

log_tail       lines of a growing file of any size and encoding: all that is new, or a sample and
               the end
progress_bars  progress bars: tqdm, rich, Keras
line_parser    one line → the figures in it, and which framework prints such lines
aggregator     many lines → last values, speed, evaluations, the loss curve
end_detection  what the end of a log says: finished, failed, or nothing
log_metrics    what was told so far, of one log or of a script's ranks
"""
