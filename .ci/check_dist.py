"""Check what lies in a source distribution and in a wheel: all that is needed, nothing else."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE_FOLDERS = ("cpp", "python", "tests", "examples")
SOURCE_FILES = (
    "CMakeLists.txt",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "Makefile",
    "constraints.txt",
)
SOURCE_SUFFIXES = {".cpp", ".h", ".cu", ".cuh", ".in", ".cmake", ".py", ".pyi", ".typed", ".md"}


def sources() -> set[str]:
    """Return the files of the repository that an sdist must hold."""
    found = {name for name in SOURCE_FILES if (ROOT / name).exists()}
    for folder in SOURCE_FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in SOURCE_SUFFIXES:
                found.add(path.relative_to(ROOT).as_posix())
    return found


def check_sdist(path: Path) -> list[str]:
    """Return what is wrong with a source distribution."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    problems = [f"{path.name} lacks {name}" for name in sorted(sources() - names)]
    return problems + [
        f"{path.name} holds the build product {name}" for name in sorted(names) if name.endswith((".so", ".o", ".pyc"))
    ]


def check_wheel(path: Path) -> list[str]:
    """Return what is wrong with a wheel."""
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
    package = {
        p.relative_to(ROOT / "python").as_posix()
        for p in (ROOT / "python" / "upfold").rglob("*.py*")
        if p.suffix in (".py", ".pyi")
    }
    problems = [f"{path.name} lacks {name}" for name in sorted(package - names)]
    if "upfold/py.typed" not in names:
        problems.append(f"{path.name} lacks upfold/py.typed")
    modules = [name for name in names if name.startswith("upfold/_cpu.") and name.endswith((".so", ".pyd"))]
    if len(modules) != 1:
        problems.append(f"{path.name} holds {len(modules)} copies of upfold._cpu")
    for name in sorted(names):
        if name.split("/")[0] not in ("upfold", "upfold.libs") and ".dist-info/" not in name:
            problems.append(f"{path.name} holds {name}")
        if name.endswith((".cpp", ".h", ".cu", ".cuh", ".in", ".cmake")):
            problems.append(f"{path.name} holds the source {name}")
    if not any(name.endswith("licenses/LICENSE") for name in names):
        problems.append(f"{path.name} lacks the licence")
    return problems


def main() -> int:
    """Check the archives named on the command line; the exit status says whether all are as they should be."""
    problems: list[str] = []
    for argument in sys.argv[1:]:
        path = Path(argument)
        problems += check_wheel(path) if path.suffix == ".whl" else check_sdist(path)
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")
    print("\n".join(problems) if problems else "sdist and wheel hold what they should")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
