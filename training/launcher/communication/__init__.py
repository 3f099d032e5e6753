"""The communication test: before training, the very ranks that a run would use prove that they can
talk (docs/communication.md)."""
