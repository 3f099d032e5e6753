"""Starting ranks, keeping their output, and saying what became of them. Nothing here imports torch."""
