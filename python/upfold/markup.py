"""Pieces of HTML that the parts of the comparison page share."""

from __future__ import annotations

import html
from collections.abc import Iterable


def escaped(value: object) -> str:
    """The value's text, fit to stand in HTML."""
    return html.escape(str(value))


def tiles(entries: Iterable[tuple[str, str, bool]]) -> str:
    """A row of figures, each with what it is and whether it is bad news."""
    cells = "".join(
        f'<div class="tile{" bad" if bad else ""}"><b>{escaped(value)}</b><span>{escaped(label)}</span></div>'
        for value, label, bad in entries
    )
    return f'<div class="tiles">{cells}</div>' if cells else ""


def pictures(entries: Iterable[tuple[str, str, str]]) -> str:
    """Charts under their headings: heading, note and SVG of each; those without an SVG are left out."""
    shown = [f'<h3>{heading}</h3><p class="note">{note}</p><figure>{svg}</figure>' for heading, note, svg in entries if svg]
    return "".join(shown)


def repeat(what: str, lines: Iterable[str]) -> str:
    """The commands that repeat the figures, folded away."""
    text = "\n".join(escaped(line) for line in lines if line)
    return f"<details><summary>Repeat one {what}</summary><pre>{text}</pre></details>" if text else ""
