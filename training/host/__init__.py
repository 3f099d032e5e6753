"""This machine and this process: GPUs, control groups, network, ports, environment variables, the
launcher above. Without torch."""
