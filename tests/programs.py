"""The programs of `examples/`, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent.parent / "examples"


def load(stem: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"upfold_example_{stem}", FOLDER / f"{stem}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
