"""The commands: each module here is the entry of one, and no other room imports them."""
