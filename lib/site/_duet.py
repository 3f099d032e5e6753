"""Entry points of an installed Duet (`pip install`): `import training.inspector`, `import
duet_inspector` and the command `duet`.

The package is a folder with the layout of a checkout, or the checkout itself (`pip install -e`). It
is not on sys.path: duet.pth imports this module at Python's start, and its finder provides
`training` only if no other finder does, so that a project keeps its own package or folder of that
name. lib/run_script.py provides the same to user scripts. Imports only modules that Python has
loaded already. Python >= 3.8.
"""

import os
import sys

HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Inside another project's `training`: only what the inspector and the helpers of a rank need.
_OFFERED = {
    name: os.path.join(HOME, *name.split("."))
    for name in ("training", "training.inspector", "training.core", "training.host")
}
_OFFERED["duet_inspector"] = os.path.join(HOME, "lib", "pythonpath", "duet_inspector")


class Finder:
    """Last in sys.meta_path: used for modules that no other finder has."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def] # typing is not loaded yet
        if name not in _OFFERED:
            return None
        from importlib.util import spec_from_file_location

        folder = _OFFERED[name]
        return spec_from_file_location(
            name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )


def main() -> None:
    """The command `duet`: runs the script of that name with this Python."""
    os.environ["DUET_PYTHON"] = sys.executable
    try:
        os.execvp("bash", ["bash", os.path.join(HOME, "duet"), *sys.argv[1:]])
    except FileNotFoundError:
        sys.exit("[ERROR] duet needs bash 4.4 or newer, but bash is not on PATH")


sys.meta_path.append(Finder)  # type: ignore[arg-type] # a class is a finder too
