"""Run-time check that all ranks train, for any training loop and as callbacks of Lightning and the
Hugging Face Trainer (docs/inspection.md).

    from training.inspector import DDPInspector

This package imports nothing else of this project, and only relatively: the launcher also provides
it as `duet_inspector`, even in a project with its own package `training` (lib/run_script.py).
"""

from .inspector import DDPInspector, InspectionError

__all__ = ["DDPInspector", "InspectionError"]
