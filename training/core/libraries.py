"""Which files of a stack belong to libraries; all others are code of the user, or of Duet.

Standard library only, Python >= 3.8: lib/run_script.py loads it in the script's environment.
"""

from __future__ import annotations

import os
import re
import sys

_INSTALLED = re.compile(
    r"^<(?!ipython-input)|(?:site|dist)-packages[/\\]"
    r"|/lib(?:64)?/python\d[\d.]*t?/|/python\d+\.zip/"
)
# A torch that was built locally, outside of the environment's packages, by the names of its parts:
# a user's folder may be called torch as well.
_BUILT = re.compile(
    r"/torch/(?:(?:amp|ao|autograd|backends|compiler|cuda|distributed|distributions|export|fft|func"
    r"|futures|fx|jit|linalg|multiprocessing|nested|nn|onnx|optim|profiler|sparse|special|testing"
    r"|_\w+)/"
    r"|utils/(?:data/|(?:checkpoint|cpp_extension|hooks)\.py\b|_)"
    r"|(?:_\w+|functional|hub|library|overrides|random|serialization|storage|types)\.py\b)"
    r"|/triton/(?:backends|compiler|language|runtime)/"
)


def contain(file: str) -> bool:
    """Is this the path of a file of a library, or the name of code without a file?"""
    return bool(_INSTALLED.search(file) or _BUILT.search(file))


def contain_here(file: str) -> bool:
    """The same for code of this process, which knows the folder of its torch, and of Triton beside
    it."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if not torch:  # not imported, or its import has failed
        return contain(file)
    around = os.path.dirname(os.path.dirname(torch))
    built = tuple(os.path.join(around, name, "") for name in ("torch", "triton"))
    return file.startswith(built) or bool(_INSTALLED.search(file))
