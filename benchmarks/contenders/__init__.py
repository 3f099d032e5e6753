"""One training loop per file: `run(job)` trains the same model on the same batches and returns the
end time of each step."""
