"""`./duet sweep`: several trainings from one command, as a grid or a list."""
