"""How an installed Duet is found (`pip install`): `import training.inspector`, `import
duet_inspector`, and the command `duet`.

The package is a folder with the layout of a checkout, or the checkout itself (`pip install -e`). It
is not on sys.path: duet.pth imports this module at Python's start, and `training` is offered only
where nothing else has that name, so that a project with a `training` of its own, a package or a
mere folder, keeps it. lib/run_script.py offers the same to a script that Duet has started. Only
what Python has loaded anyway is imported here. Python >= 3.8.
"""

import os
import sys

HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Inside a `training` of another project only what the inspector and the helpers of a rank need.
_OFFERED = {
    name: os.path.join(HOME, *name.split("."))
    for name in ("training", "training.inspector", "training.core", "training.host")
}
_OFFERED["duet_inspector"] = os.path.join(HOME, "lib", "pythonpath", "duet_inspector")


class Finder:
    """Asked last, when no other finder has the module."""

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
    """The command `duet`: the script of that name, with this Python, which has the packages."""
    os.environ["DUET_PYTHON"] = sys.executable
    try:
        os.execvp("bash", ["bash", os.path.join(HOME, "duet"), *sys.argv[1:]])
    except FileNotFoundError:
        sys.exit("[ERROR] duet needs bash 4.4 or newer, and there is none on PATH")


sys.meta_path.append(Finder)  # type: ignore[arg-type] # a class is a finder too
