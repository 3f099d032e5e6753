"""`training.inspector` under a name that no project has, for those with a package `training` of
their own (docs/inspection.md):

PYTHONPATH=/path/to/duet/lib/pythonpath, or ./launch_train.sh N --script …

from duet_inspector import DDPInspector
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[3] / "training" / "inspector")]

from .inspector import DDPInspector, InspectionError  # type: ignore[import-not-found]

__all__ = ["DDPInspector", "InspectionError"]
