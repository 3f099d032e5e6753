"""The commands: one module each; no other package imports them."""
