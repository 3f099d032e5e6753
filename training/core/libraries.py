"""Which files of a stack belong to libraries; all others are code of the user, or of Duet.

Standard library only, Python >= 3.8: lib/run_script.py loads it in the script's environment.
"""

from __future__ import annotations

import re

# Also a torch that was built locally, outside of the environment's packages, by the names of its
# parts: a user's folder may be called torch as well.
_FILE = re.compile(
    r"^<(?!ipython-input)|(?:site|dist)-packages[/\\]"
    r"|/lib(?:64)?/python\d[\d.]*t?/|/python\d+\.zip/"
    r"|/torch/(?:(?:nn|distributed|autograd|optim|multiprocessing|cuda|amp|fx|jit|_\w+)/"
    r"|utils/(?:data/|checkpoint\.py\b|_)"
    r"|(?:_\w+|functional|hub|library|overrides|random|serialization|storage)\.py\b)"
    r"|/triton/(?:backends|compiler|language|runtime)/"
)


def contain(file: str) -> bool:
    """Is this the path of a file of a library, or the name of code without a file?"""
    return _FILE.search(file) is not None
