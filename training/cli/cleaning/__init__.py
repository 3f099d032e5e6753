"""`./duet clean`: its options, what they select, and the deletion."""
