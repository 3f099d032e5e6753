"""What this machine has: GPUs, memory, ports, and the environment variables that follow from it. No torch here."""
