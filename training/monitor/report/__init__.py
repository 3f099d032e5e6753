"""A run, or a comparison of several, as one HTML file that needs nothing else: no server, no
network, no JavaScript to be read."""
