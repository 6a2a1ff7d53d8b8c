"""Check the facts that several files state: the version, the pinned tools, the oldest Python."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def read(name: str) -> str:
    """Return the text of a file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def canonical(name: str) -> str:
    """Return a distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def check_version(problems: list[str]) -> None:
    """The changelog's newest heading and any literal in the package carry the version of pyproject.toml."""
    version = re.search(r'^version = "(.+)"$', read("pyproject.toml"), re.MULTILINE).group(1)  # type: ignore[union-attr]
    headings = re.findall(r"^## \[?([0-9][^\] ]*)", read("CHANGELOG.md"), re.MULTILINE)
    if not headings or headings[0] != version:
        problems.append(f"CHANGELOG.md: newest version {headings[:1]}; pyproject.toml says {version}")
    for source in sorted((ROOT / "python" / "upfold").glob("*.py")):
        for literal in re.findall(r'^__version__ = "([^"]+)"', source.read_text(encoding="utf-8"), re.MULTILINE):
            if literal != version:
                problems.append(f"{source.name}: __version__ = {literal}; pyproject.toml says {version}")


def check_pins(problems: list[str]) -> None:
    """Every requirement of the package and its extras is pinned, and a pin in both places is the same."""
    lines = [line.split(";")[0].strip() for line in read("constraints.txt").splitlines()]
    pins: dict[str, set[str]] = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            pins.setdefault(canonical(name), set()).add(version)
    pyproject = read("pyproject.toml")
    wanted = re.search(r"^dependencies = \[(.*)\]$", pyproject, re.MULTILINE).group(1)  # type: ignore[union-attr]
    for extra in ("cli", "test", "models", "dev"):
        wanted += re.search(rf"^{extra} = \[(.*?)\]$", pyproject, re.MULTILINE | re.DOTALL).group(1)  # type: ignore[union-attr]
    wanted += re.search(r"^requires = \[(.*)\]$", pyproject, re.MULTILINE).group(1)  # type: ignore[union-attr]
    for requirement in re.findall(r'"([^"]+)"', wanted):
        name, operator, version = re.fullmatch(r"([\w.-]+)(?:\[.*\])?\s*([=<>~!]*)(.*)", requirement).groups()  # type: ignore[union-attr]
        if name == "upfold":
            continue
        if canonical(name) not in pins:
            problems.append(f"constraints.txt: {name} is not pinned")
        elif operator == "==" and version not in pins[canonical(name)]:
            problems.append(f"constraints.txt: {name} is pinned to {pins[canonical(name)]}, pyproject.toml says {version}")


def check_python(problems: list[str]) -> None:
    """requires-python, the classifiers, ruff, mypy, CMake and cibuildwheel agree on the oldest Python."""
    pyproject = read("pyproject.toml")
    oldest = re.search(r'^requires-python = ">=3\.(\d+)"$', pyproject, re.MULTILINE).group(1)  # type: ignore[union-attr]
    classifiers = min(int(found) for found in re.findall(r"Python :: 3\.(\d+)", pyproject))
    wheels = min(int(found) for found in re.findall(r"\bcp3(\d+)-", pyproject))
    stated = {
        "classifiers": str(classifiers),
        "ruff": re.search(r'target-version = "py3(\d+)"', pyproject).group(1),  # type: ignore[union-attr]
        "mypy": re.search(r'python_version = "3\.(\d+)"', pyproject).group(1),  # type: ignore[union-attr]
        "cibuildwheel": str(wheels),
        "CMakeLists.txt": re.search(r"Python 3\.(\d+) REQUIRED", read("CMakeLists.txt")).group(1),  # type: ignore[union-attr]
    }
    problems += [
        f"{where}: Python 3.{value}; requires-python says 3.{oldest}" for where, value in stated.items() if value != oldest
    ]


def main() -> int:
    """Print every disagreement; the exit status says whether there is none."""
    problems: list[str] = []
    check_version(problems)
    check_pins(problems)
    check_python(problems)
    print("\n".join(problems) if problems else "versions agree")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
