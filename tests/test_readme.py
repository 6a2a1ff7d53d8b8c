"""The README: its Python blocks run as they stand, its commands exist, its links and pictures are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from upfold import cli

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8") if (ROOT / "README.md").is_file() else ""
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [
    (language, body, TEXT[: start.start()].count("\n") + 1)
    for start in BLOCK.finditer(TEXT)
    for language, body in [start.groups()]
]
PYTHON = [(body, line) for language, body, line in BLOCKS if language in ("python", "py")]


def shell_commands():
    lines = "\n".join(body for language, body, _ in BLOCKS if language in ("sh", "bash", "shell", "console"))
    found = [line.removeprefix("$ ").strip() for line in lines.replace("\\\n", " ").splitlines()]
    return [line for line in found if line.startswith("upfold ")]


def test_there_is_a_readme_with_python_in_it():
    assert PYTHON, "README.md has no Python block"


def test_python_blocks_run_in_order(tmp_path, monkeypatch):
    """Blocks share one namespace, top to bottom, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "readme"}
    for body, line in PYTHON:
        code = compile("\n" * line + body, str(ROOT / "README.md"), "exec")
        exec(code, namespace)


@pytest.mark.parametrize("command", shell_commands())
def test_commands_parse(command):
    words = [word for word in shlex.split(command, comments=True)[1:] if word not in (">", "|")]
    if words and not words[0].startswith("-"):
        arguments = cli._parser().parse_args(words)
        assert arguments.name == words[0]


def test_local_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#\s]+)", TEXT) + re.findall(r"<img[^>]+src=\"([^\"]+)\"", TEXT)
    missing = [target for target in targets if "://" not in target and not (ROOT / target).exists()]
    assert missing == []
