"""The options that several commands share: the layer or the model, its dtype, and where it runs."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .geometry import InvalidArgument
from .problem import DTYPE_BYTES

DTYPES = {str(dtype).rpartition(".")[2]: dtype for dtype in DTYPE_BYTES}


class Failure(Exception):
    """Ends a command with one line on stderr and exit status 2."""


def add_run(parser: argparse.ArgumentParser, layout: bool = True) -> None:
    """Add dtype, device, threads and layout to a command."""
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of the tensors (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ... (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    if layout:
        layouts = ("contiguous", "channels_last")
        parser.add_argument(
            "--layout", default="contiguous", choices=layouts, help="of the input and the weight (default: %(default)s)"
        )


def add_ways(parser: argparse.ArgumentParser) -> None:
    """Add the choice of further rows of upfold's, and of torch's switch for float32 on a GPU, to a command."""
    text = "time every tile choice of each algorithm (gemm#1 ...), not its best guess alone"
    parser.add_argument("--configs", action="store_true", help=text)
    text = "time the forward with weights packed before, as upfold.freeze keeps them, too (fused frozen)"
    parser.add_argument("--frozen", action="store_true", help=text)
    text = "of float32 on a GPU, torch's and upfold's alike: TF32 or full accuracy (default: torch's switch as it stands)"
    parser.add_argument("--precision", choices=("tf32", "ieee"), help=text)


def chosen_precision(arguments: argparse.Namespace, device: torch.device) -> str | None:
    """What --precision says, refused where it would say nothing."""
    precision: str | None = arguments.precision
    if precision is not None and (device.type != "cuda" or arguments.dtype != "float32"):
        raise Failure(
            f"--precision = {precision}; --dtype {arguments.dtype} on {device} has no such switch; it is for float32 on a GPU"
        )
    return precision


def add_layer(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe one layer to a command."""
    group = parser.add_argument_group("the layer", "A flag takes one number, or one for each spatial axis.")
    group.add_argument("--case", metavar="NAME", help="a named layer of the bench's suites, in place of the flags below")
    group.add_argument(
        "--in", dest="in_channels", type=int, default=64, metavar="N", help="input channels (default: %(default)s)"
    )
    group.add_argument(
        "--out", dest="out_channels", type=int, default=32, metavar="N", help="output channels (default: %(default)s)"
    )
    for flag, default in (("kernel", 2), ("stride", None), ("padding", 0), ("output-padding", 0), ("dilation", 1)):
        text = f"(default: {default})" if default is not None else "(default: 1)"
        group.add_argument(f"--{flag}", type=int, nargs="+", default=[1 if default is None else default], metavar="N", help=text)
    group.add_argument("--groups", type=int, default=1, metavar="N", help="(default: %(default)s)")
    group.add_argument(
        "--size",
        type=int,
        nargs="+",
        default=[8, 8],
        metavar="N",
        help="spatial size of the input, 1 to 3 numbers (default: 8 8)",
    )
    group.add_argument("--batch", type=int, default=1, metavar="N", help="(default: %(default)s)")
    group.add_argument("--bias", action="store_true", help="add a bias (a named layer has its published flag)")
    group.add_argument("--max-gflop", type=positive, help="cut the batch, then the size, down to this")
    add_run(parser)


def add_model(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """Add a model and the shapes of its inputs to a command."""
    text = "a function without arguments that returns a model, or a model"
    parser.add_argument("model", metavar="package.module:build", nargs=nargs, help=text)
    text = "shape of an input; repeat for more"
    parser.add_argument("--input", action="append", default=[], metavar="1x3x512x512", type=shape, help=text)
    add_run(parser, layout=False)


@contextlib.contextmanager
def chosen_model(arguments: argparse.Namespace) -> Iterator[tuple[torch.nn.Module, list[torch.Tensor]]]:
    """The model and random inputs, for a block that runs it: what it says to them is told in one line."""
    device, dtype = chosen_device(arguments), DTYPES[arguments.dtype]
    model = _load_model(arguments.model).to(device)
    if dtype != torch.float32:
        model = model.to(dtype)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.rand(shape, generator=generator).to(device, dtype) for shape in arguments.input]
    try:
        yield model, inputs
    except (InvalidArgument, ValueError, OSError):
        raise
    except Exception as error:  # the model's own, on the user's input
        raise Failure(f"the model does not take {['x'.join(map(str, shape)) for shape in arguments.input]}: {error}") from None


def _load_model(path: str) -> torch.nn.Module:
    module_name, colon, attribute = path.partition(":")
    if not colon or not attribute:
        raise Failure(f"model = {path!r}; must be package.module:build")
    sys.path.insert(0, "")  # the user's own folder, which a console script does not search
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise Failure(f"model = {path!r}; cannot import {module_name}: {error}") from None
    finally:
        sys.path.remove("")
    found = getattr(module, attribute, None)
    if found is None:
        raise Failure(f"model = {path!r}; {module_name} has no {attribute}")
    try:
        model = found if isinstance(found, torch.nn.Module) else found()
    except Exception as error:  # the user's own function
        raise Failure(f"model = {path!r}; {attribute}() fails: {type(error).__name__}: {error}") from None
    if not isinstance(model, torch.nn.Module):
        raise Failure(f"model = {path!r}; gives {type(model).__name__}, not a torch.nn.Module")
    return model


def positive(text: str) -> float:
    """Read a number above 0."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text}; must be above 0")
    return value


def shape(text: str) -> tuple[int, ...]:
    """Read sizes joined by x."""
    try:
        return tuple(int(entry) for entry in text.lower().split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; sizes joined by x, for example 1x3x512x512") from None


def chosen_device(arguments: argparse.Namespace) -> torch.device:
    """The device that --device names, after --threads took effect."""
    if getattr(arguments, "threads", None) is not None:
        if arguments.threads < 1:
            raise Failure(f"--threads = {arguments.threads}; must be at least 1")
        torch.set_num_threads(arguments.threads)
    try:
        device = torch.device(arguments.device)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise Failure(f"--device = {arguments.device!r}; must be cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        from . import info

        raise Failure(f"--device = {arguments.device}; CUDA is unavailable: {info.cuda_state()['reason']}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Failure(f"--device = {arguments.device}; there are {torch.cuda.device_count()} GPUs, counted from 0")
    return device


def chosen_case(arguments: argparse.Namespace) -> Any:
    """The layer that the flags describe."""
    from . import cases

    if arguments.case is not None:
        case = cases.find(arguments.case)
    else:
        ndim = len(arguments.size)
        if ndim > 3:
            raise Failure(f"--size = {arguments.size}; 1 to 3 numbers, one for each spatial axis")
        axes = {}
        for name in ("kernel", "stride", "padding", "output_padding", "dilation"):
            entries = getattr(arguments, name)
            if len(entries) not in (1, ndim):
                raise Failure(f"--{name.replace('_', '-')} = {entries}; one number, or {ndim} as in --size")
            axes[name] = tuple(entries) * (ndim // len(entries))
        for flag, value in (
            ("in", arguments.in_channels),
            ("out", arguments.out_channels),
            ("groups", arguments.groups),
        ):
            if value < 1:
                raise Failure(f"--{flag} = {value}; must be at least 1")
        if arguments.out_channels % arguments.groups or arguments.in_channels % arguments.groups:
            raise Failure(
                f"--groups = {arguments.groups}; must divide --in {arguments.in_channels} and --out {arguments.out_channels}"
            )
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
        from .geometry import conv_transpose_shape

        weight = (case.in_channels, case.out_channels // case.groups, *case.kernel_size)
        conv_transpose_shape((case.batch, case.in_channels, *case.in_size), weight, None, case.geometry)
        if case.batch < 1:
            raise Failure(f"--batch = {case.batch}; must be at least 1, an empty batch takes no time")
    return case if arguments.max_gflop is None else case.scaled(arguments.max_gflop)


def layer_words(case: Any, arguments: argparse.Namespace) -> list[str]:
    """The flags that describe a layer again, for a repro line."""
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


def load_charts(path: str) -> Any:
    """The module that draws, and its library: asked for now, not after minutes of work."""
    import matplotlib  # noqa: F401

    from . import charts

    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise Failure(f"--chart = {path}; must end in .png, .svg or .pdf")
    return charts


def load_page() -> Any:
    """The module that writes the comparison page, and the library that it draws with."""
    import matplotlib  # noqa: F401

    from . import page

    return page


def write_json(path: str, facts: dict[str, Any]) -> None:
    """Write figures to a file, and say so."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")
