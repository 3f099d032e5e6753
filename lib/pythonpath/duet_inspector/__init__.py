"""`training.inspector` under a unique name, for projects with their own package `training`
(docs/inspection.md):

PYTHONPATH=/path/to/duet/lib/pythonpath, or ./launch_train.sh N --script …

from duet_inspector import DDPInspector
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[3] / "training" / "inspector")]

from .inspector import DDPInspector, InspectionError  # type: ignore[import-not-found]

__all__ = ["DDPInspector", "InspectionError"]
