"""Ready configurations for two ranks. They are data: plain assignments, read without being
executed."""
