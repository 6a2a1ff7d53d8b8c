"""The promises of the CPU suite, kept on a GPU: every test there that takes a `device` runs again with this folder's."""

from __future__ import annotations

import importlib
import inspect

import pytest

from gpu import missing

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu

for stem in (
    "exact",
    "rounding",
    "properties",
    "gradients",
    "backward",
    "explain",
    "determinism",
    "training",
    "layouts",
    "fold",
    "machinery",
    "transforms",
    "crop",
    "freeze",
    "never_stale",
):
    for name, value in vars(importlib.import_module(f"test_{stem}")).items():
        if name.startswith("test_") and "device" in inspect.signature(value).parameters:
            globals()[f"test_{stem}_{name.removeprefix('test_')}"] = value
