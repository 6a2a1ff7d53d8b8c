"""What `scan`, `replace`, `restore`, `fuse` and `tune` tell: rows of layers or problems, as text, a dictionary or a table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .plans import Measured


@dataclass(frozen=True)
class LayerRow:
    """One layer of a model.

    Attributes:
        name: path of the layer in the model, "" for the model itself.
        aliases: further paths of the same layer, where a model uses it in several places.
        layer: name of its class in torch.nn, for example "ConvTranspose2d".
        state: "torch", "upfold", "replaced", "restored" or "left alone".
        reason: why it was left alone, or None.
        settings: the layer's own description of its arguments.
        parameters: number of weights and biases, or None while they are not initialised.
        calls: how often one run of the model calls it, or None without inputs.
        input_shapes: distinct shapes that came in, in the order of arrival.
        output_shapes: the shapes that they became.
        seconds: time inside the layer in one run of the model.
        share: `seconds` as a part, 0 to 1, of the whole run.
        algorithm: what upfold takes for the first input shape.
        why: why it takes that, or why it was not measured.
        torch_seconds, upfold_seconds: what the calls of one run take with either, where they were measured.
    """

    name: str
    aliases: tuple[str, ...]
    layer: str
    state: str
    reason: str | None = None
    settings: str = ""
    parameters: int | None = None
    calls: int | None = None
    input_shapes: tuple[tuple[int, ...], ...] = ()
    output_shapes: tuple[tuple[int, ...], ...] = ()
    seconds: float | None = None
    share: float | None = None
    algorithm: str | None = None
    torch_seconds: float | None = None
    upfold_seconds: float | None = None
    why: str | None = None

    @property
    def ratio(self) -> float | None:
        """How many times faster upfold is than torch on the calls of this layer."""
        return self.torch_seconds / self.upfold_seconds if self.torch_seconds and self.upfold_seconds else None


@dataclass(frozen=True)
class WholeModel:
    """What one run of a whole model takes, end to end.

    Attributes:
        reason: why it was not measured, or None.
        torch_seconds, upfold_seconds, fused_seconds: with torch's layers, replaced, and fused, each measured beside the others;
            the last is None where nothing can be fused.
        operations: number of operations that were fused.
    """

    reason: str | None = None
    torch_seconds: float | None = None
    upfold_seconds: float | None = None
    fused_seconds: float | None = None
    operations: int = 0

    def text(self) -> str:
        """One sentence: the times, and how many times faster than torch's layers each is."""
        if self.torch_seconds is None:
            return f"whole model: not measured, {self.reason}"
        parts = [f"torch {_time(self.torch_seconds)}"]
        for name, seconds in (("upfold", self.upfold_seconds), ("fused", self.fused_seconds)):
            if seconds is not None:
                parts.append(f"{name} {_time(seconds)} ({self.torch_seconds / seconds:.2f}x)")
        return "whole model: " + ", ".join(parts)


@dataclass(frozen=True)
class Report:
    """The rows of one `scan`, `replace` or `restore`, in the model's order.

    Attributes:
        action: "scan", "replace" or "restore".
        rows: one for each transposed convolution, fold and unfold layer of the model.
        seconds: time of one run of the model, where `scan` was given inputs.
        whole: the model's time with torch's layers, upfold's, and fused, where `scan` was given inputs.
    """

    action: str
    rows: tuple[LayerRow, ...]
    seconds: float | None = None
    whole: WholeModel | None = None

    def __iter__(self) -> Iterator[LayerRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def changed(self) -> tuple[LayerRow, ...]:
        """The layers that were replaced or restored."""
        return tuple(row for row in self.rows if row.state in ("replaced", "restored"))

    @property
    def left_alone(self) -> tuple[LayerRow, ...]:
        """The layers that cannot be replaced or were not faster, each with its reason."""
        return tuple(row for row in self.rows if row.state == "left alone")

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers."""
        return asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def summary(self) -> str:
        """One sentence on all rows."""
        count = f"{len(self.rows)} layer{'' if len(self.rows) == 1 else 's'}"
        kinds = "transposed convolution, fold and unfold layers"
        if not self.rows:
            return f"{self.action}: the model has no {kinds}"
        if self.action != "scan":
            return f"{self.action}: {len(self.changed)} of {count} {self.action}d"
        shares = [row.share for row in self.rows if row.share is not None]
        if self.seconds is None or not shares:
            return f"scan: {count}"
        share = sum(shares)
        text = f"scan: {count}, {share:.0%} of the model's {_time(self.seconds)}"
        # Without the layers the model would still take the rest: no method for them makes it faster than this.
        return f"{text}; were they free, it would be {1 / (1 - share):.2f}x as fast" if share < 0.95 else text

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Column titles and cells, leaving out what no row has."""
        columns = [
            ("layer", [row.name or "(the model)" for row in self.rows]),
            ("class", [row.layer for row in self.rows]),
            ("settings", [row.settings for row in self.rows]),
            ("parameters", ["" if row.parameters is None else f"{row.parameters:,}" for row in self.rows]),
            ("input", [", ".join(_shape(shape) for shape in row.input_shapes) for row in self.rows]),
            ("calls", ["" if row.calls is None else str(row.calls) for row in self.rows]),
            ("time", [_time(row.seconds) for row in self.rows]),
            ("share", ["" if row.share is None else f"{row.share:.1%}" for row in self.rows]),
            ("torch", [_time(row.torch_seconds) for row in self.rows]),
            ("upfold", [_time(row.upfold_seconds) for row in self.rows]),
            ("x torch", ["" if row.ratio is None else f"{row.ratio:.2f}x" for row in self.rows]),
            ("algorithm", [row.algorithm or "" for row in self.rows]),
            ("why", [row.why or "" for row in self.rows]),
            ("state", [row.state + (f": {row.reason}" if row.reason else "") for row in self.rows]),
        ]
        kept = [(title, cells) for title, cells in columns if any(cells)]
        return [title for title, _ in kept], [list(cells) for cells in zip(*(cells for _, cells in kept), strict=True)]

    def __str__(self) -> str:
        if not self.rows:
            return self.summary()
        titles, rows = self.table()
        return "\n".join((*aligned(titles, *rows), self.summary(), *self._end_to_end()))

    def _end_to_end(self) -> list[str]:
        return [] if self.whole is None else [self.whole.text()]

    def __rich__(self) -> Any:
        """The same as a table of rich, for ``rich.print(report)``."""
        from rich.table import Table
        from rich.text import Text

        if not self.rows:
            return Text(self.summary())
        titles, rows = self.table()
        table = Table(title="\n".join((self.summary(), *self._end_to_end())), title_justify="left")
        for title in titles:
            numeric = title in ("parameters", "calls", "time", "share", "torch", "upfold", "x torch")
            table.add_column(title, justify="right" if numeric else "left", overflow="fold")
        for cells in rows:
            table.add_row(*map(Text, cells))
        return table


@dataclass(frozen=True)
class FuseRow:
    """One transposed convolution of a model that was fused.

    Attributes:
        name: path of the layer in the model, "" for the model itself.
        layer: name of its class in torch.nn.
        state: "fused", "replaced" (upfold computes it, and nothing else is fused into it) or "left alone".
        fused: what was fused into it, in order: modules by class and path, functions, crops, "concatenation".
        reason: why what follows then was not, or why the layer was left alone; None where nothing is left to fuse.
    """

    name: str
    layer: str
    state: str
    fused: tuple[str, ...] = ()
    reason: str | None = None


@dataclass(frozen=True)
class FuseReport:
    """What one `fuse` did, a row for each transposed convolution, in the model's order."""

    rows: tuple[FuseRow, ...]

    def __iter__(self) -> Iterator[FuseRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers."""
        return asdict(self)

    def summary(self) -> str:
        """One sentence on all rows."""
        if not self.rows:
            return "fuse: the model has no transposed convolution layers"
        fused = [row for row in self.rows if row.state == "fused"]
        taken = sum(len(row.fused) for row in fused)
        count = f"{len(self.rows)} layer{'' if len(self.rows) == 1 else 's'}"
        return f"fuse: {len(fused)} of {count} fused with {taken} operation{'' if taken == 1 else 's'}"

    def __str__(self) -> str:
        if not self.rows:
            return self.summary()
        lines = [("layer", "class", "state", "fused into it", "why no more")]
        for row in self.rows:
            lines.append((row.name or "(the model)", row.layer, row.state, ", ".join(row.fused), row.reason or ""))
        return "\n".join((*aligned(*lines), self.summary()))


@dataclass(frozen=True)
class TuneRow:
    """One class of problems that `tune` met.

    Attributes:
        layers: paths of the modules that call it, "" for the model itself.
        operator: "forward", "grad_input" or "grad_weight".
        problem: the shapes that were timed, the kernel and the type, as text.
        state: "tuned", "known" (its plan is older), "not reached" or "left alone".
        reason: why it was left alone, or None.
        ranking: the best config of each algorithm and its seconds, fastest first; the first is the plan.
        untuned: what upfold would run without a plan; its time is None where it was not among those timed.
        timed: number of algorithms and configs that were timed.
        not_reached: number of those that the time did not suffice for.
    """

    layers: tuple[str, ...]
    operator: str
    problem: str
    state: str
    reason: str | None = None
    ranking: tuple[Measured, ...] = ()
    untuned: str | None = None
    untuned_seconds: float | None = None
    timed: int = 0
    not_reached: int = 0


@dataclass(frozen=True)
class TuneReport:
    """What one `tune` measured.

    Attributes:
        rows: one for each class of problems, in the model's order.
        seconds: time that the measuring took.
        budget: time that it might take.
        file: where the plans were written, or None where they stay in this process.
        in_use: whether `auto` follows plans: neither UPFOLD_TUNED nor `use` says no.
    """

    rows: tuple[TuneRow, ...]
    seconds: float
    budget: float
    file: str | None
    in_use: bool = True

    def __iter__(self) -> Iterator[TuneRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers."""
        facts = asdict(self)
        for row, entry in zip(self.rows, facts["rows"]):
            entry["ranking"] = [one._asdict() for one in row.ranking]
        return facts

    def summary(self) -> str:
        """One sentence on all rows."""
        if not self.rows:
            return "tune: no transposed convolution ran"
        tuned, known = (sum(row.state == state for row in self.rows) for state in ("tuned", "known"))
        text = f"tune: {tuned} of {len(self.rows)} problem{'' if len(self.rows) == 1 else 's'} tuned in {self.seconds:.1f} s"
        text += f", {known} known before" if known else ""
        missed = sum(row.not_reached for row in self.rows)
        if missed:
            text += f"; {self.budget:g} s did not reach {missed} of {missed + sum(row.timed for row in self.rows)} candidates"
        if tuned:
            text += f"; plans in {self.file}" if self.file else "; the plans stay in this process"
        return text if self.in_use else text + "; not used: UPFOLD_TUNED or upfold.use(tuned=False) is in force"

    def __str__(self) -> str:
        if not self.rows:
            return self.summary()
        lines = [("layers", "operator", "problem", "plan", "time", "untuned", "time", "torch", "state")]
        for row in self.rows:
            seconds = {one.algorithm: one.seconds for one in row.ranking}
            best = row.ranking[0] if row.ranking else None
            lines.append(
                (
                    ", ".join(name or "(the model)" for name in row.layers),
                    row.operator,
                    row.problem,
                    f"{best.algorithm}#{best.config}" if best else "",
                    _time(best.seconds if best else None),
                    row.untuned or "",
                    _time(row.untuned_seconds),
                    _time(seconds.get("torch")),
                    row.state + (f": {row.reason}" if row.reason else ""),
                )
            )
        return "\n".join((*aligned(*lines), self.summary()))


def aligned(*lines: Sequence[str]) -> list[str]:
    """Lines of cells as text in columns."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
