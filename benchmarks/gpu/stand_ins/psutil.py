"""In place of a missing psutil: found, but not importable."""

raise ModuleNotFoundError("psutil is not installed (benchmarks/gpu/stand_ins)", name="psutil")
