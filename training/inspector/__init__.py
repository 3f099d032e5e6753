"""Do all ranks really train? For anybody's loop, and as callbacks of Lightning and the Hugging Face
Trainer (docs/inspection.md).

    from training.inspector import DDPInspector

This package imports nothing else of this project and only relatively: under the launcher it is also
found as `duet_inspector`, and inside a project that has its own package `training`
(lib/run_script.py).
"""

from .inspector import DDPInspector, InspectionError

__all__ = ["DDPInspector", "InspectionError"]
