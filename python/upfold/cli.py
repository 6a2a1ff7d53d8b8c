"""The command line: ``upfold demo | compare | bench | chart | explain | scan | tune | info``."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from . import __version__, model_commands
from .geometry import InvalidArgument
from .modes import FORWARD, MODES
from .options import (
    DTYPES,
    Failure,
    add_layer,
    add_run,
    add_ways,
    chosen_case,
    chosen_device,
    chosen_precision,
    layer_words,
    load_charts,
    load_page,
    positive,
    write_json,
)
from .precision import float32_precision

_SUITES = ("smoke", "edge", "seeds", "decoders", "irregular", "survey", "fold", "host", "rate", "activation", "models")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after ``upfold``; None takes those of the process.

    Returns:
        The exit status: 0; 1 when a method of upfold's broke or was wrong, after all was measured; or 2 when the command could
        not be carried out.
    """
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed its line, or the help
        return int(stop.code or 0)
    try:
        failures: Sequence[str] = arguments.command(arguments) or ()
    except Failure as failure:
        return _complain(arguments.name, str(failure))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("rich", "matplotlib"):
            raise
        return _complain(arguments.name, f"{error.name} is not installed; pip install 'upfold[cli]' brings it")
    except (InvalidArgument, ValueError, OSError) as error:
        return _complain(arguments.name, str(error))
    except KeyboardInterrupt:
        return _complain(arguments.name, "interrupted", 130)
    for text in failures:
        _complain(arguments.name, text)
    return 1 if failures else 0


def _complain(command: str, text: str, status: int = 2) -> int:
    print(f"upfold {command}: {' '.join(text.split())}", file=sys.stderr)
    return status


# --- options ---------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    what = "Transposed convolution for PyTorch: compare methods, explain choices, scan and tune models."
    parser = _Parser(prog="upfold", description=what)
    parser.add_argument("--version", action="version", version=f"upfold {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, (function, add_options, text, *examples) in _COMMANDS.items():
        command: argparse.ArgumentParser = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog="\n  ".join(["example:" if len(examples) == 1 else "examples:", *examples]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(command=function, name=name)
        add_options(command)
    return parser


def _demo_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--folder", default="demo", help="where the pictures go (default: %(default)s)")
    sizes = (128, 256, 512)
    command.add_argument("--size", type=int, default=512, choices=sizes, help="pixels on a side (default: %(default)s)")
    command.add_argument("--device", help="where to run (default: a GPU that upfold has kernels for, else cpu)")
    _add_seconds(command, 0.4)


def _compare_options(command: argparse.ArgumentParser) -> None:
    add_layer(command)
    _add_seconds(command, 0.5)
    command.add_argument("--mode", default=FORWARD, choices=MODES, help="which operator, or a step of all (default: %(default)s)")
    add_ways(command)
    command.add_argument("--json", metavar="FILE", help="also write every figure as JSON")
    command.add_argument("--chart", metavar="FILE", help="also draw the times (.png, .svg or .pdf)")


def _bench_options(command: argparse.ArgumentParser) -> None:
    suites = (*_SUITES, "all")
    text = "which (default: smoke); all leaves out the survey of further layers, activation and models, which take minutes"
    command.add_argument("--suite", nargs="+", default=["smoke"], choices=suites, help=text)
    text = "cut larger cases down to this (default: 0.5 on a CPU, whole on a GPU)"
    command.add_argument("--max-gflop", type=positive, help=text)
    _add_seconds(command, 0.2)
    command.add_argument(
        "--mode", nargs="+", default=[FORWARD], choices=MODES, help="which operators, or steps (default: forward)"
    )
    add_ways(command)
    model_commands.bench_options(command)
    text = "on a CPU that is not idle: one thread, and the time that this process computes"
    command.add_argument("--cpu-time", action="store_true", help=text)
    command.add_argument("--json", metavar="FILE", help="also write every figure as JSON")
    text = "also draw the suites of layers, or where there are none the models (.png, .svg or .pdf)"
    command.add_argument("--chart", metavar="FILE", help=text)
    command.add_argument("--report", metavar="FOLDER", help="also write a page of tables and charts, FOLDER/index.html")
    add_run(command)


def _chart_options(command: argparse.ArgumentParser) -> None:
    text = "what upfold bench --json or make gpu-check wrote; several are runs by their names"
    command.add_argument("results", nargs="+", metavar="FILE.json", help=text)
    text = "runs of a file that holds several, side by side (default: the first)"
    command.add_argument("--run", nargs="+", default=[], metavar="NAME", help=text)
    text = "suites of layers, as the file calls them (default: all without a gradient), or models"
    command.add_argument("--suite", nargs="+", default=[], metavar="NAME", help=text)
    command.add_argument("--layer", nargs="+", default=[], metavar="NAME", help="layers (default: all of the suites)")
    text = "methods (default: gemm, direct, depthwise, fused, torch and torch channels_last)"
    command.add_argument("--method", nargs="+", default=[], metavar="NAME", help=text)
    command.add_argument("--chart", metavar="FILE", help="draw them (.png, .svg or .pdf); without it a Markdown table is printed")
    text = "write a page of tables and charts of all runs of the file, FOLDER/index.html"
    command.add_argument("--report", metavar="FOLDER", help=text)


def _explain_options(command: argparse.ArgumentParser) -> None:
    add_layer(command)
    text = "also say it of the gradients, of double backward and of forward mode"
    command.add_argument("--gradients", action="store_true", help=text)


def _info_options(command: argparse.ArgumentParser) -> None:
    text = "add the plan of a layer and a line that repeats it, for a bug report"
    command.add_argument("--report", action="store_true", help=text)
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_layer(command)


def _add_seconds(command: argparse.ArgumentParser, default: float) -> None:
    text = "time spent on each method (default: %(default)s)"
    command.add_argument("--seconds", type=positive, default=default, help=text)


# --- commands --------------------------------------------------------------------------------------------------------


def _demo(arguments: argparse.Namespace) -> None:
    import matplotlib  # noqa: F401  (asked for now, not after a minute of work)

    from . import demo

    device = None if arguments.device is None else chosen_device(arguments)
    demo.run(arguments.folder, device=device, size=arguments.size, seconds=arguments.seconds)


def _compare(arguments: argparse.Namespace) -> list[str]:
    import rich  # noqa: F401

    from . import compare, tables

    if arguments.chart is not None:
        charts = load_charts(arguments.chart)
    device, case = chosen_device(arguments), chosen_case(arguments)
    precision = chosen_precision(arguments, device)
    switched = contextlib.nullcontext() if precision is None else float32_precision(precision == "tf32")
    conditions = compare.Conditions(arguments.layout, arguments.seconds, arguments.mode, arguments.configs, arguments.frozen)
    console = tables.make_console()
    with console.status("measuring"), switched:
        result = compare.compare_case(case, conditions, dtype=DTYPES[arguments.dtype], device=device)
    tables.print_comparison(console, result)
    if arguments.json is not None:
        from . import bench, info

        facts = {"schema": bench.SCHEMA, "machine": info.gather(), "comparison": result.to_dict()}
        write_json(arguments.json, facts)
    if arguments.chart is not None:
        charts.write_chart([result], arguments.chart)
        print(f"wrote {arguments.chart}")
    return result.failures


def _bench(arguments: argparse.Namespace) -> list[str]:
    import rich  # noqa: F401

    from . import bench, tables

    for flag, value in (("chart", arguments.chart), ("report", arguments.report)):
        if value is not None and not {"all", *bench.CASE_SUITES, bench.MODEL_SUITE} & set(arguments.suite):
            raise Failure(f"--{flag} = {value}; --suite {' '.join(arguments.suite)} has no layers to draw")
    if arguments.chart is not None:
        load_charts(arguments.chart)
    if arguments.report is not None:
        load_page()
    device = chosen_device(arguments)
    if arguments.cpu_time and device.type != "cpu":
        raise Failure(f"--cpu-time --device {device}; the time that a process computes says nothing of a GPU; leave it out")
    names = bench.names_of(arguments.suite)
    limit = arguments.max_gflop or (bench.CPU_MAX_GFLOP if device.type == "cpu" else None)
    options = bench.Options(
        device,
        DTYPES[arguments.dtype],
        arguments.layout,
        limit,
        arguments.seconds,
        tuple(dict.fromkeys(arguments.mode)),
        chosen_precision(arguments, device),
        arguments.configs,
        tuple(dict.fromkeys(arguments.model)),
        None if arguments.size is None else arguments.size == "published",
        not arguments.no_compile,
        arguments.cpu_time,
        arguments.frozen,
    )
    results = bench.run(names, options, tables.make_console(), arguments.json)
    if arguments.json is not None:
        print(f"wrote {arguments.json}")
    facts = results.to_dict()
    if arguments.chart is not None:
        _draw(facts, arguments.chart)
    if arguments.report is not None:
        print(f"wrote {load_page().write_page(facts, arguments.report)}")
    return results.failures


def _draw(facts: dict[str, Any], path: str) -> None:
    """Draw the layers of a run, or where it has none its models."""
    from . import overview
    from .models import charts as model_charts
    from .models.overview import model_runs

    if facts["suites"]:
        written = load_charts(path).write_overview([overview.run_of(facts)], path)
    else:
        written = model_charts.write_models_chart(model_runs(facts), path)
    print(f"wrote {written}")


def _chart(arguments: argparse.Namespace) -> None:
    from . import overview

    if arguments.report is not None:
        page = load_page()
        print(f"wrote {page.write_page(overview.read_facts(arguments.results), arguments.report)}")
        if arguments.chart is None:
            return
    if arguments.suite == ["models"]:
        _chart_models(arguments)
        return
    runs = overview.read_runs(arguments.results, arguments.run, arguments.suite, arguments.layer)
    if arguments.chart is None:
        print(overview.markdown(runs, arguments.method))
        return
    charts = load_charts(arguments.chart)
    print(f"wrote {charts.write_overview(runs, arguments.chart, arguments.method)}")


def _chart_models(arguments: argparse.Namespace) -> None:
    from .models import charts as model_charts
    from .models.overview import markdown, model_runs
    from .overview import read_facts

    runs = model_runs(read_facts(arguments.results), arguments.run)
    if arguments.chart is None:
        print(markdown(runs))
        return
    load_charts(arguments.chart)
    print(f"wrote {model_charts.write_models_chart(runs, arguments.chart)}")


def _explain(arguments: argparse.Namespace) -> None:
    print(_explanation(arguments))


def _explanation(arguments: argparse.Namespace) -> str:
    from .explanation import explain
    from .modes import in_layout

    case, device = chosen_case(arguments), chosen_device(arguments)
    x, w, b = case.tensors(dtype=DTYPES[arguments.dtype], device=device)
    x, w = (in_layout(t, arguments.layout) for t in (x, w))
    layer = SimpleNamespace(weight=w, bias=b, **case.arguments())
    return str(explain(layer, x, gradients=getattr(arguments, "gradients", False)))


def _info(arguments: argparse.Namespace) -> None:
    from . import info

    chosen_device(arguments)
    facts = info.gather()
    if arguments.report:
        case = chosen_case(arguments)
        size = math.prod(case.in_size) * case.batch
        explanation = _explanation(arguments) if size < 2**24 else "too large to explain here"
        facts["plan"], facts["repro"] = explanation, "upfold info --report " + " ".join(layer_words(case, arguments))
    if arguments.json:
        print(json.dumps(facts, indent=1))
        return
    print(info.info_text(facts))
    if arguments.report:
        print(f"\n{facts['plan']}\nrepro: {facts['repro']}")


_COMMANDS: dict[str, tuple[Any, ...]] = {
    "demo": (
        _demo,
        _demo_options,
        "a photograph through a decoder, with torch's layers and with upfold's",
        "upfold demo --folder demo",
    ),
    "compare": (
        _compare,
        _compare_options,
        "every method on one layer: time, GFLOP/s, GB/s, x floor, x torch, error",
        "upfold compare --in 256 --out 128 --kernel 4 --stride 2 --padding 1 --size 64 64 --batch 8 --dtype float32",
        "upfold compare --case dla-depthwise-256@64 --max-gflop 0.1 --json depthwise.json --chart depthwise.png",
    ),
    "bench": (
        _bench,
        _bench_options,
        "suites of layers and whole models against torch, each result checked before it is timed",
        "upfold bench --suite smoke",
        "upfold bench --suite fold host --seconds 0.05 --json bench.json",
        "upfold bench --suite smoke --mode grad_input grad_weight --configs",
        "upfold bench --suite smoke --mode step",
        "upfold bench --suite smoke --json bench.json --chart bench.png",
        "upfold bench --suite smoke --report out",
        "upfold bench --suite models --model dcgan unet --no-compile",
    ),
    "chart": (
        _chart,
        _chart_options,
        "the suites of a results file as a chart of times over the floor, or as a Markdown table",
        "upfold chart bench.json --suite smoke --chart bench.png",
        "upfold chart bench.json --layer k4s2p1 3d-k2s2 --method gemm direct torch",
        "upfold chart bench.json --report out",
    ),
    "explain": (
        _explain,
        _explain_options,
        "what runs for a layer, and what each algorithm says to it",
        "upfold explain --in 64 --out 32 --kernel 2 --stride 2 --size 8 8",
        "upfold explain --in 64 --out 32 --kernel 2 --stride 2 --size 8 8 --gradients",
    ),
    "scan": (
        model_commands.scan,
        model_commands.scan_options,
        "the transposed-convolution layers of a model, their share of its time, and what replacing and fusing them gains",
        "upfold scan upfold.decoder:build --input 1x3x128x128",
        "upfold scan upfold.decoder:build --input 1x3x64x64 --json scan.json --chart scan.png",
    ),
    "tune": (
        model_commands.tune,
        model_commands.tune_options,
        "time every algorithm on a model's layers and remember the fastest; ship the plans with a model",
        "upfold tune upfold.decoder:build --input 1x3x64x64 --seconds 5",
        "upfold tune --export plans.json",
    ),
    "info": (
        _info,
        _info_options,
        "versions, how the package was built, CPU, GPU, and why CUDA is unavailable",
        "upfold info",
        "upfold info --report --in 64 --out 32 --kernel 2 --stride 2 --size 8 8",
    ),
}


if __name__ == "__main__":
    sys.exit(main())
