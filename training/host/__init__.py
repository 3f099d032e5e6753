"""This machine and this process: GPUs, control groups, network, ports, environment variables, who
has started us. No torch here."""
