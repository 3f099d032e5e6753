"""In place of a missing pynvml: found, but not importable."""

raise ModuleNotFoundError("pynvml is not installed (benchmarks/gpu/stand_ins)", name="pynvml")
