"""KAIR's option files: their keys, and how they become fields."""
