"""`python -m training.diagnose`: the same as `./duet diagnose`. Scripts rely on this command."""

from __future__ import annotations

import runpy

if __name__ == "__main__":  # started by name: no room imports a later one
    runpy.run_module("training.cli.diagnose", run_name="__main__", alter_sys=True)
