"""Benchmarks: run as modules, print ratios from interleaved rounds. Not part of the tests."""
