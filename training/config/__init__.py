"""Configuration: fields (schema), files (.py, .json), flags, their merge with origins (resolve),
batch arithmetic, fault injection."""
