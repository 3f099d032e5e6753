"""The scaling check: measures runs of 1, 2, … ranks on this machine and reports what limits them.
Never imports torch."""
