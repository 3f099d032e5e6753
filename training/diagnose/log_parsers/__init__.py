"""Training metrics from logs of any program, in the form that a Duet run has. No torch.

log_tail       new lines of a growing file of any size and encoding: all, or a sample and the end
progress_bars  progress bars: tqdm, rich, Keras
chinese_names  names of metrics in Chinese lines
line_parser    one line → its metrics and the framework that prints such lines
unnamed_steps  the step of a line that has only numbers in brackets or a batch
aggregator     many lines → last values, speed, evaluations, the loss curve
end_detection  outcome from the end of a log: finished, failed, or unknown
log_metrics    metrics of one log, or of a user script's ranks
"""
