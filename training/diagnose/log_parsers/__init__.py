"""A log that no launcher of ours made: what its lines tell of a training, shown like a run. No torch here.

text    lines of a growing file of any size and encoding: all that is new, or a sample and the end
bars    progress bars: tqdm, rich, Keras
lines   one line → the figures in it, and which framework prints such lines
tally   many lines → last values, speed, evaluations, the loss curve
ending  what the end of a log says: finished, failed, or nothing
figures what was told so far, of one log or of a script's ranks
watch   all of it as the dict that state.Watch returns
"""
