"""Watches a running training from outside: who waits for whom, where a rank is stuck. Imports no torch."""
