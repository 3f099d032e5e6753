"""The commands: each module here is the entry of one, and nothing imports them."""
