"""The compiled modules: `_cpu` always, `_cuda` where it was built and loads."""

from __future__ import annotations

import os
from functools import lru_cache
from types import ModuleType

from . import _cpu

MISSING_CUDA = (
    f"upfold was built without its CUDA module ({_cpu.build_info()['cuda_reason']}); reinstall with UPFOLD_CUDA=ON pip install ."
)


def cpu() -> ModuleType:
    """The CPU module."""
    return _cpu


@lru_cache(maxsize=1)
def load_cuda() -> tuple[ModuleType | None, str | None]:
    """Import the CUDA module: (module, None), or (None, the reason in a sentence)."""
    folder = os.path.dirname(__file__)
    if not any(name.startswith("_cuda.") and not name.endswith(".pyi") for name in os.listdir(folder)):
        return None, MISSING_CUDA
    try:
        from . import _cuda
    except ImportError as error:
        return None, f"upfold's CUDA module does not load: {error}"
    return _cuda, None
