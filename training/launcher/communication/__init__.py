"""Communication test: before training, the ranks of the run prove that they can communicate
(docs/communication.md)."""
