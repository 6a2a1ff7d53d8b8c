"""Print what pyproject.toml asks for under some extras, one requirement a line, upfold itself left out."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def section(text: str, name: str) -> list[str]:
    """Return the strings of `name = [...]`; a TOML parser is in the standard library only from Python 3.11."""
    found = re.search(rf"^{name} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    return re.findall(r'"([^"]+)"', found.group(1)) if found else []


def requirements(text: str, extras: list[str]) -> list[str]:
    """Return the requirements of the extras, with `upfold[other]` replaced by what it stands for."""
    result: list[str] = []
    for extra in extras:
        for requirement in section(text, extra):
            nested = re.fullmatch(r"upfold\[(.+)\]", requirement)
            found = requirements(text, nested.group(1).split(",")) if nested else [requirement]
            result += [item for item in found if item not in result]
    return result


if __name__ == "__main__":
    pyproject = Path(__file__).resolve().parent.parent / "pyproject.toml"
    print("\n".join(requirements(pyproject.read_text(), sys.argv[1].split(","))))
