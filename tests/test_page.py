"""The comparison page: one file that needs nothing else and holds every figure, losses and failures included."""

from __future__ import annotations

import re

import pytest

from test_bench import facts_of_two_layers
from upfold import InvalidArgument, cli

pytest.importorskip("matplotlib", reason="matplotlib is an extra of the command line")

from upfold import page  # noqa: E402


def written(facts, folder):
    path = page.write_page(facts, folder)
    assert path == folder / "index.html"
    return path.read_text(encoding="utf-8")
