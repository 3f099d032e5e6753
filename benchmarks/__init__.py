"""What measures us: run as modules, print ratios from one interleaved run. Never part of the
tests."""
