"""Starts a run on several machines from one command (`--hosts`): ssh, a look at each machine
first, then the same launch command on all of them."""
