"""The bench: suites of layers, fold and unfold, the host's time, whole models; each checked before it is timed, none asserted."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from . import cases, dispatch, info
from .activated import run_activation
from .compare import Conditions, compare_case
from .comparison import Comparison, dtype_name
from .fresh import fresh_line
from .models import MODELS, by_name
from .models import result as model_result
from .models.measure import Conditions as ModelConditions
from .models.measure import run_model
from .models.tables import print_model, print_models_summary
from .modes import FORWARD
from .pairs import PairRow, print_pairs, run_fold, run_host
from .patch import unpatched
from .precision import float32_precision
from .rates import run_rate
from .summary import summarize
from .tables import LEGEND, progress_bar, suite_table, summary_table
from .timing import cpu_clock

CASE_SUITES = cases.TIERS
MODEL_SUITE = "models"
# What "all" stands for; whole models and layers with activations, which take minutes to compile, and the survey are asked for by
# name.
SUITES = (*(suite for suite in CASE_SUITES if suite != "survey"), "fold", "host", "rate")
# Of a results file; raised when a key changes its meaning.
SCHEMA = 1
_PAIRS = {"fold": run_fold, "host": run_host, "rate": run_rate, "activation": run_activation}
# What a CPU gets through in reasonable time; a GPU runs every case whole.
CPU_MAX_GFLOP = 0.5


@dataclass(frozen=True)
class Options:
    """How the bench runs.

    Attributes:
        device: where.
        dtype: of the tensors.
        layout: of x and of gradients.
        max_gflop: the largest case in GFLOP; None runs every case whole.
        seconds: time spent on each method.
        modes: which operators, or whole steps (`modes.MODES`), for the suites of layers.
        precision: "tf32" or "ieee" sets torch's switches for float32 on a GPU during the run; None leaves them as they are.
        configs: whether every config of an algorithm gets a row.
        models: which whole models, by name; none takes all.
        published: whether they have their published sizes; None does so on a GPU alone.
        compiled: whether they run under ``torch.compile`` as well.
        cpu_time: on a CPU, one thread and the time that the process computes, for a machine that is not idle.
        frozen: whether methods that pack weights get a row with weights packed before, as `freeze` keeps them.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    max_gflop: float | None = None
    seconds: float = 0.2
    modes: tuple[str, ...] = (FORWARD,)
    precision: str | None = None
    configs: bool = False
    models: tuple[str, ...] = ()
    published: bool | None = None
    compiled: bool = True
    cpu_time: bool = False
    frozen: bool = False


@dataclass
class Results:
    """What one run of the bench measured."""

    machine: dict[str, Any]
    device: str
    options: Options
    suites: dict[str, list[Comparison]] = field(default_factory=dict)
    pairs: dict[str, list[PairRow]] = field(default_factory=dict)
    models: list[model_result.ModelResult] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """What broke or is wrong of upfold's in any suite, a line for each."""
        layers = [text for rows in self.suites.values() for comparison in rows for text in comparison.failures]
        pairs = [text for rows in self.pairs.values() for row in rows for text in row.failures]
        return layers + pairs + [text for result in self.models for text in result.failures]

    def to_dict(self) -> dict[str, Any]:
        """Every figure, for JSON; that of a gradient is called ``decoders grad_input``, of steps ``decoders step``."""
        models: dict[str, Any] = {}
        if self.models:
            models[MODEL_SUITE] = [result.to_dict() for result in self.models]
            models["models_summary"] = model_result.summarize(self.models)
        return {
            "schema": SCHEMA,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": self.machine,
            "device": self.device,
            "dtype": dtype_name(self.options.dtype),
            "precision": self.options.precision,
            "layout": self.options.layout,
            "max_gflop": self.options.max_gflop,
            "cpu_time": self.options.cpu_time,
            "failures": self.failures,
            "summary": {name: summarize(rows) for name, rows in self.suites.items()},
            "suites": {name: [comparison.to_dict() for comparison in rows] for name, rows in self.suites.items()},
            **{name: [row.to_dict() for row in rows] for name, rows in self.pairs.items()},
            **models,
        }

    def write(self, path: str | Path) -> Path:
        """Write the figures as JSON and return the path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        return path

    def write_if(self, path: str | Path | None) -> None:
        """Write them where there is a path."""
        if path is not None:
            self.write(path)


def names_of(suites: Sequence[str]) -> tuple[str, ...]:
    """The suites that words name, each once; "all" stands for `SUITES`."""
    return tuple(dict.fromkeys(name for word in suites for name in (SUITES if word == "all" else (word,))))


@unpatched()
def run(names: Sequence[str], options: Options, console: Any, path: str | Path | None = None) -> Results:
    """Run suites and print a table for each as soon as it is done.

    Args:
        names: of the suites (`SUITES`, ``activation`` and `MODEL_SUITE`).
        options: how to run.
        console: a rich console.
        path: where the figures go as JSON, after each suite and each whole model, so that a run cut short leaves what it has.

    Returns:
        Every figure.
    """
    on_gpu = options.device.type == "cuda"
    device_name = torch.cuda.get_device_name(options.device) if on_gpu else info.processor()
    given = options.precision is not None
    precision = float32_precision(options.precision == "tf32") if given else contextlib.nullcontext()
    clock = cpu_clock() if options.cpu_time else contextlib.nullcontext()
    with clock, precision, dispatch.use(tuned=False):  # figures do not hang on what was tuned on the machine that made them
        results = Results(info.gather(), device_name, options)
        kind = " ".join(filter(None, (dtype_name(options.dtype), options.precision)))
        threads = f"{torch.get_num_threads()} CPU threads" if not options.cpu_time else "CPU time of one thread"
        where = f"{results.device}, {threads}, {kind}, x {options.layout}"
        for name in names:
            if name in CASE_SUITES:
                for mode in options.modes:
                    label = name if mode == FORWARD else f"{name} {mode}"
                    results.suites[label] = _run_cases(name, mode, options, console)
                    _print_suite(console, label, where, results.suites[label])
                    results.write_if(path)
                continue
            if name == MODEL_SUITE:
                console.print(f"[bold]{name}: {where}[/]")
                for result in _run_models(options, console):
                    results.models.append(result)
                    results.write_if(path)
                print_models_summary(console, results.models)
                continue
            with console.status(f"timing {name}"):
                results.pairs[name] = _PAIRS[name](options.device, options.dtype, options.seconds, _repro(name, options))
            print_pairs(console, f"{name}: {where}", results.pairs[name])
            results.write_if(path)
    return results


def _run_cases(suite: str, mode: str, options: Options, console: Any) -> list[Comparison]:
    chosen = cases.by_tier(suite)
    conditions = Conditions(options.layout, options.seconds, mode, options.configs, options.frozen)
    done: list[Comparison] = []
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(chosen))
        for case in chosen:
            progress.update(task, description=f"{suite}: {case.name}")
            scaled = case if options.max_gflop is None else case.scaled(options.max_gflop)
            done.append(compare_case(scaled, conditions, dtype=options.dtype, device=options.device))
            progress.advance(task)
    return done


def _run_models(options: Options, console: Any) -> Iterator[model_result.ModelResult]:
    chosen = tuple(map(by_name, options.models)) or MODELS
    on_gpu = options.device.type == "cuda"
    published = on_gpu if options.published is None else options.published
    words = _flags(options)
    words += [] if options.layout == "contiguous" else [f"--layout {options.layout}"]
    words += [] if published == on_gpu else [f"--size {'published' if published else 'small'}"]
    conditions = ModelConditions(
        options.dtype,
        options.device,
        options.layout,
        small=not published,
        seconds=3 * options.seconds,
        compiled=options.compiled,
        flags=" ".join(words),
    )
    for case in chosen:
        with console.status(f"{MODEL_SUITE}: {case.name}"):
            result = run_model(case, conditions)
        print_model(console, result)
        yield result


def _print_suite(console: Any, label: str, where: str, rows: Sequence[Comparison]) -> None:
    console.print(suite_table(f"{label}: {where}", rows, console.width))
    for row in rows:
        for method in row.rows:
            if method.failed:
                console.print(f"{row.name}: {method.method}: {method.note}", style="red", markup=False)
    console.print(summary_table(label, rows, console.width))
    if (fresh := fresh_line(rows)) is not None:
        console.print("\n" + fresh, markup=False)
    console.print("\n" + LEGEND, style="dim")
    console.print("* cut down to run sooner (--max-gflop sets how far). To repeat one line:", style="dim")
    for row in rows:
        cut = row.size_text.partition(" (")[2].rstrip(")")
        console.print(f"  {row.repro}" + (f"   # {row.name}, {cut}" if cut else ""), style="dim", soft_wrap=True)


def _repro(suite: str, options: Options) -> str:
    return " ".join((f"upfold bench --suite {suite}", *_flags(options)))


def _flags(options: Options) -> list[str]:
    words = [f"--dtype {dtype_name(options.dtype)}"]
    if options.device.type != "cpu":
        words.append(f"--device {options.device}")
    if options.precision is not None:
        words.append(f"--precision {options.precision}")
    return words
