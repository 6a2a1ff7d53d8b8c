"""The command line: ``upfold demo | compare | bench | explain | scan | info``."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from .problem import DTYPE_BYTES, InvalidArgument

_DTYPES = {str(dtype).rpartition(".")[2]: dtype for dtype in DTYPE_BYTES}
_SUITES = ("smoke", "edge", "seeds", "decoders", "irregular", "fold", "host")
_LAYER = "--in 64 --out 32 --kernel 2 --stride 2 --size 8 8"


class _Failure(Exception):
    """Ends a command with one line on stderr and exit status 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after ``upfold``; None takes those of the process.

    Returns:
        The exit status: 0, or 2 when the command could not be carried out.
    """
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed its line, or the help
        return int(stop.code or 0)
    try:
        arguments.command(arguments)
    except _Failure as failure:
        return _complain(arguments.name, str(failure))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("rich", "matplotlib", "platformdirs"):
            raise
        return _complain(arguments.name, f"{error.name} is not installed; pip install 'upfold[cli]' brings it")
    except (InvalidArgument, ValueError, OSError) as error:
        return _complain(arguments.name, str(error))
    except KeyboardInterrupt:
        return _complain(arguments.name, "interrupted", 130)
    return 0


def _complain(command: str, text: str, status: int = 2) -> int:
    print(f"upfold {command}: {' '.join(text.split())}", file=sys.stderr)
    return status


# --- options ---------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="upfold", description="Transposed convolution for PyTorch: compare methods, explain choices, scan models.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)

    def add(name: str, function: Any, what: str, *examples: str) -> argparse.ArgumentParser:
        lines = "\n".join(f"  {example}" for example in examples)
        command: argparse.ArgumentParser = commands.add_parser(
            name,
            help=what,
            description=what[0].upper() + what[1:] + ".",
            epilog=f"example{'s' if len(examples) > 1 else ''}:\n{lines}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(command=function, name=name)
        return command

    demo = add("demo", _demo, "a photograph through a decoder, with torch's layers and with upfold's", "upfold demo --folder demo")
    demo.add_argument("--folder", default="demo", help="where the pictures go (default: %(default)s)")
    demo.add_argument("--size", type=int, default=512, choices=(128, 256, 512), help="pixels on a side (default: %(default)s)")
    demo.add_argument("--device", help="where to run (default: a GPU that upfold has kernels for, else cpu)")
    demo.add_argument("--seconds", type=_positive, default=0.4, help="time spent on each method (default: %(default)s)")

    compare = add(
        "compare",
        _compare,
        "every method on one layer: time, GFLOP/s, GB/s, x floor, x torch, error",
        "upfold compare --in 256 --out 128 --kernel 4 --stride 2 --padding 1 --size 64 64 --batch 8 --dtype float32",
        "upfold compare --case dla-depthwise-256@64 --max-gflop 0.1 --json depthwise.json --chart depthwise.png",
    )
    _add_layer(compare)
    compare.add_argument("--seconds", type=_positive, default=0.5, help="time spent on each method (default: %(default)s)")
    compare.add_argument("--json", metavar="FILE", help="also write every figure as JSON")
    compare.add_argument("--chart", metavar="FILE", help="also draw the times (.png, .svg or .pdf)")

    bench = add(
        "bench",
        _bench,
        "suites of layers against torch, each result checked before it is timed",
        "upfold bench --suite smoke",
        "upfold bench --suite fold host --seconds 0.05 --json bench.json",
    )
    bench.add_argument("--suite", nargs="+", default=["smoke"], choices=(*_SUITES, "all"), help="which (default: smoke)")
    bench.add_argument("--max-gflop", type=_positive, help="cut larger cases down to this (default: 0.5 on a CPU, whole on a GPU)")
    bench.add_argument("--seconds", type=_positive, default=0.2, help="time spent on each method (default: %(default)s)")
    bench.add_argument("--json", metavar="FILE", help="also write every figure as JSON")
    _add_run(bench)

    explain = add("explain", _explain, "what runs for a layer, and what each algorithm says to it", f"upfold explain {_LAYER}")
    _add_layer(explain)

    scan = add(
        "scan",
        _scan,
        "the transposed-convolution layers of a model and their share of its time",
        "upfold scan upfold.decoder:build --input 1x3x128x128",
    )
    scan.add_argument("model", metavar="package.module:build", help="a function without arguments that returns a model, or a model")
    scan.add_argument("--input", action="append", default=[], metavar="1x3x512x512", type=_shape, help="shape of an input; repeat for more")
    scan.add_argument("--json", metavar="FILE", help="also write the report as JSON")
    _add_run(scan, layout=False)

    info = add("info", _info, "versions, how the package was built, CPU, GPU, and why CUDA is unavailable", "upfold info", "upfold info --report")
    info.add_argument("--report", action="store_true", help="add the plan of a layer and a line that repeats it, for a bug report")
    info.add_argument("--json", action="store_true", help="print JSON instead of text")
    _add_layer(info)
    return parser


def _add_run(parser: argparse.ArgumentParser, layout: bool = True) -> None:
    parser.add_argument("--dtype", default="float32", choices=_DTYPES, help="of the tensors (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ... (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    if layout:
        layouts = ("contiguous", "channels_last")
        parser.add_argument("--layout", default="contiguous", choices=layouts, help="of the input (default: %(default)s)")


def _add_layer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the layer", "A flag takes one number, or one for each spatial axis.")
    group.add_argument("--case", metavar="NAME", help="a named layer of the bench's suites, in place of the flags below")
    group.add_argument("--in", dest="in_channels", type=int, default=64, metavar="N", help="input channels (default: %(default)s)")
    group.add_argument("--out", dest="out_channels", type=int, default=32, metavar="N", help="output channels (default: %(default)s)")
    for flag, default in (("kernel", 2), ("stride", None), ("padding", 0), ("output-padding", 0), ("dilation", 1)):
        text = f"(default: {default})" if default is not None else "(default: 1)"
        group.add_argument(f"--{flag}", type=int, nargs="+", default=[1 if default is None else default], metavar="N", help=text)
    group.add_argument("--groups", type=int, default=1, metavar="N", help="(default: %(default)s)")
    group.add_argument("--size", type=int, nargs="+", default=[8, 8], metavar="N", help="spatial size of the input, 1 to 3 numbers (default: 8 8)")
    group.add_argument("--batch", type=int, default=1, metavar="N", help="(default: %(default)s)")
    group.add_argument("--bias", action="store_true", help="add a bias (a named layer has its published flag)")
    group.add_argument("--max-gflop", type=_positive, help="cut the batch, then the size, down to this")
    _add_run(parser)


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text}; must be above 0")
    return value


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(entry) for entry in text.lower().split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; sizes joined by x, for example 1x3x512x512") from None


def _device(arguments: argparse.Namespace) -> torch.device:
    if getattr(arguments, "threads", None) is not None:
        if arguments.threads < 1:
            raise _Failure(f"--threads = {arguments.threads}; must be at least 1")
        torch.set_num_threads(arguments.threads)
    try:
        device = torch.device(arguments.device)
    except RuntimeError:
        raise _Failure(f"--device = {arguments.device!r}; must be cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        from . import info

        raise _Failure(f"--device = {arguments.device}; CUDA is unavailable: {info.cuda_state()['reason']}")
    return device


def _case(arguments: argparse.Namespace) -> Any:
    """The layer that the flags describe."""
    from . import cases

    if arguments.case is not None:
        case = cases.find(arguments.case)
    else:
        ndim = len(arguments.size)
        if ndim > 3:
            raise _Failure(f"--size = {arguments.size}; 1 to 3 numbers, one for each spatial axis")
        axes = {}
        for name in ("kernel", "stride", "padding", "output_padding", "dilation"):
            entries = getattr(arguments, name)
            if len(entries) not in (1, ndim):
                raise _Failure(f"--{name.replace('_', '-')} = {entries}; one number, or {ndim} as in --size")
            axes[name] = tuple(entries) * (ndim // len(entries))
        for flag, value in (("in", arguments.in_channels), ("out", arguments.out_channels), ("groups", arguments.groups)):
            if value < 1:
                raise _Failure(f"--{flag} = {value}; must be at least 1")
        if arguments.out_channels % arguments.groups or arguments.in_channels % arguments.groups:
            raise _Failure(f"--groups = {arguments.groups}; must divide --in {arguments.in_channels} and --out {arguments.out_channels}")
        case = cases.Case(
            name="layer",
            tier="custom",
            batch=arguments.batch,
            in_channels=arguments.in_channels,
            out_channels=arguments.out_channels,
            in_size=tuple(arguments.size),
            kernel_size=axes["kernel"],
            stride=axes["stride"],
            padding=axes["padding"],
            output_padding=axes["output_padding"],
            dilation=axes["dilation"],
            groups=arguments.groups,
            bias=arguments.bias,
        )
        from .problem import conv_transpose_shape

        weight = (case.in_channels, case.out_channels // case.groups, *case.kernel_size)
        conv_transpose_shape((case.batch, case.in_channels, *case.in_size), weight, None, case.geometry)
        if case.batch < 1:
            raise _Failure(f"--batch = {case.batch}; must be at least 1, an empty batch takes no time")
    return case if arguments.max_gflop is None else case.scaled(arguments.max_gflop)


# --- commands --------------------------------------------------------------------------------------------------------


def _demo(arguments: argparse.Namespace) -> None:
    import matplotlib  # noqa: F401  (asked for now, not after a minute of work)

    from . import demo

    device = None if arguments.device is None else _device(arguments)
    demo.run(arguments.folder, device=device, size=arguments.size, seconds=arguments.seconds)


def _compare(arguments: argparse.Namespace) -> None:
    import rich  # noqa: F401

    from . import compare, tables

    if arguments.chart is not None:
        import matplotlib  # noqa: F401

        from . import charts

        if Path(arguments.chart).suffix not in (".png", ".svg", ".pdf"):
            raise _Failure(f"--chart = {arguments.chart}; must end in .png, .svg or .pdf")
    device, case = _device(arguments), _case(arguments)
    console = tables.make_console()
    with console.status("measuring"):
        result = compare.compare_case(
            case, dtype=_DTYPES[arguments.dtype], device=device, layout=arguments.layout, seconds=arguments.seconds
        )
    tables.print_comparison(console, result)
    if arguments.json is not None:
        from . import bench, info

        facts = {"schema": bench.SCHEMA, "machine": info.gather(), "comparison": result.to_dict()}
        _write_json(arguments.json, facts)
    if arguments.chart is not None:
        charts.write_chart([result], arguments.chart)
        print(f"wrote {arguments.chart}")


def _bench(arguments: argparse.Namespace) -> None:
    import rich  # noqa: F401

    from . import bench, tables

    device = _device(arguments)
    names = bench.SUITES if "all" in arguments.suite else tuple(dict.fromkeys(arguments.suite))
    limit = arguments.max_gflop
    if limit is None and device.type == "cpu":
        limit = bench.CPU_MAX_GFLOP
    options = bench.Options(device, _DTYPES[arguments.dtype], arguments.layout, limit, arguments.seconds)
    results = bench.run(names, options, tables.make_console())
    if arguments.json is not None:
        print(f"wrote {results.write(arguments.json)}")


def _explain(arguments: argparse.Namespace) -> None:
    print(_explanation(arguments))


def _explanation(arguments: argparse.Namespace) -> str:
    from . import compare, dispatch

    case, device = _case(arguments), _device(arguments)
    x, w, b = case.tensors(dtype=_DTYPES[arguments.dtype], device=device)
    if arguments.layout == "channels_last" and case.ndim > 1:
        x = x.contiguous(memory_format=(torch.channels_last, torch.channels_last_3d)[case.ndim - 2])
    return str(dispatch.explain(compare.describe(x, w, b, case.geometry), device=device))


def _scan(arguments: argparse.Namespace) -> None:
    from .replace import scan

    device = _device(arguments)
    model = _load_model(arguments.model).to(device)
    dtype = _DTYPES[arguments.dtype]
    if dtype != torch.float32:
        model = model.to(dtype)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.rand(shape, generator=generator).to(device, dtype) for shape in arguments.input]
    try:
        with torch.no_grad():
            report = scan(model, *inputs)
    except (InvalidArgument, ValueError):
        raise
    except Exception as error:  # the model's own, on the user's input
        raise _Failure(f"the model does not take {['x'.join(map(str, shape)) for shape in arguments.input]}: {error}") from None
    print(report)
    if arguments.json is not None:
        _write_json(arguments.json, report.to_dict())


def _load_model(path: str) -> torch.nn.Module:
    module_name, colon, attribute = path.partition(":")
    if not colon or not attribute:
        raise _Failure(f"model = {path!r}; must be package.module:build")
    sys.path.insert(0, "")  # the user's own folder, which a console script does not search
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise _Failure(f"model = {path!r}; cannot import {module_name}: {error}") from None
    finally:
        sys.path.remove("")
    found = getattr(module, attribute, None)
    if found is None:
        raise _Failure(f"model = {path!r}; {module_name} has no {attribute}")
    model = found if isinstance(found, torch.nn.Module) else found()
    if not isinstance(model, torch.nn.Module):
        raise _Failure(f"model = {path!r}; gives {type(model).__name__}, not a torch.nn.Module")
    return model


def _info(arguments: argparse.Namespace) -> None:
    from . import info

    _device(arguments)
    facts = info.gather()
    if arguments.report:
        case = _case(arguments)
        size = math.prod(case.in_size) * case.batch
        explanation = _explanation(arguments) if size < 2**24 else "too large to explain here"
        facts["plan"], facts["repro"] = explanation, "upfold info --report " + " ".join(_layer_words(case, arguments))
    if arguments.json:
        print(json.dumps(facts, indent=1))
        return
    print(info.info_text(facts))
    if arguments.report:
        print(f"\n{facts['plan']}\nrepro: {facts['repro']}")


def _layer_words(case: Any, arguments: argparse.Namespace) -> list[str]:
    words = [f"--in {case.in_channels} --out {case.out_channels}"]
    for flag, entries in (
        ("kernel", case.kernel_size),
        ("stride", case.stride),
        ("padding", case.padding),
        ("output-padding", case.output_padding),
        ("dilation", case.dilation),
        ("size", case.in_size),
    ):
        words.append(f"--{flag} " + " ".join(map(str, entries)))
    words.append(f"--groups {case.groups} --batch {case.batch} --dtype {arguments.dtype} --layout {arguments.layout}")
    words.append(f"--device {arguments.device}" + (" --bias" if case.bias else ""))
    return words


def _write_json(path: str, facts: dict[str, Any]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
