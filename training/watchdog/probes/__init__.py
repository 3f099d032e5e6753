"""What can be seen of running ranks from outside: processes, stacks, sockets, collectives."""
