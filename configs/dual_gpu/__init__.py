"""Ready configurations for two ranks: plain assignments, read without executing them."""
