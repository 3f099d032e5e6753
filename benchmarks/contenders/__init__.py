"""One training loop a file: `run(job)` trains the same model on the same batches and returns when
each step ended."""
