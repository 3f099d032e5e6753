"""Benchmarks: run as modules, print ratios from interleaved rounds. Not part of the tests."""

NANOCHAT_DIR = "NANOCHAT_DIR"  # the user's checkout of nanochat
