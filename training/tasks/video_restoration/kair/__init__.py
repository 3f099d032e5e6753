"""Support for KAIR's option files: their keys and the conversion to fields."""
