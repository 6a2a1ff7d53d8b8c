"""The commands that take a model: ``upfold scan`` and ``upfold tune``; and what ``upfold bench`` is told of its own models."""

from __future__ import annotations

import argparse

import torch

from .options import Failure, add_model, chosen_model, load_charts, positive, write_json


def scan_options(command: argparse.ArgumentParser) -> None:
    """The flags of ``upfold scan``."""
    add_model(command)
    command.add_argument("--json", metavar="FILE", help="also write the report as JSON")
    text = "also draw the layers, their share and the whole model (.png, .svg or .pdf); needs --input"
    command.add_argument("--chart", metavar="FILE", help=text)


def tune_options(command: argparse.ArgumentParser) -> None:
    """The flags of ``upfold tune``."""
    add_model(command, nargs="?")
    text = "time for all measuring; best guesses come first (default: %(default)s)"
    command.add_argument("--seconds", type=positive, default=60.0, help=text)
    command.add_argument("--gradients", action="store_true", help="also tune the gradients that a backward computes")
    command.add_argument("--again", action="store_true", help="measure anew what has a plan already")
    command.add_argument("--json", metavar="FILE", help="also write the report as JSON")
    command.add_argument("--import", metavar="FILE", help="first add the plans of a file to the cache", dest="plans")
    command.add_argument("--export", metavar="FILE", help="then write all plans to a file, to be shipped with a model")


def bench_options(command: argparse.ArgumentParser) -> None:
    """The flags of ``upfold bench`` for its suite of whole models."""
    group = command.add_argument_group("the suite of whole models")
    group.add_argument("--model", nargs="+", default=[], metavar="NAME", help="which (default: all)")
    text = "of the models (default: small on a CPU, published on a GPU)"
    group.add_argument("--size", choices=("published", "small"), help=text)
    group.add_argument("--no-compile", action="store_true", help="leave torch.compile out")


def scan(arguments: argparse.Namespace) -> None:
    """Survey a model."""
    from . import scan as survey

    if arguments.chart is not None:
        load_charts(arguments.chart)
        if not arguments.input:
            raise Failure(f"--chart = {arguments.chart}; needs --input, or nothing is measured that could be drawn")
    with chosen_model(arguments) as (model, inputs), torch.no_grad():
        report = survey(model, *inputs)
    print(report)
    if arguments.json is not None:
        write_json(arguments.json, report.to_dict())
    if arguments.chart is not None:
        from .scan_chart import write_scan_chart

        print(f"wrote {write_scan_chart(report, arguments.chart, arguments.model)}")


def tune(arguments: argparse.Namespace) -> None:
    """Tune a model, or move plans between files."""
    from . import load_plans, save_plans
    from . import tune as tune_model

    if (arguments.model, arguments.plans, arguments.export) == (None, None, None):
        raise Failure("nothing to do; name a model (package.module:build), --import FILE or --export FILE")
    if arguments.plans is not None:
        print(f"{arguments.plans}: {load_plans(arguments.plans, keep=True)} plans for the devices of this machine")
    if arguments.model is not None:
        options = {"seconds": arguments.seconds, "gradients": arguments.gradients, "again": arguments.again}
        with chosen_model(arguments) as (model, inputs):
            report = tune_model(model, *inputs, **options)
        print(report)
        if arguments.json is not None:
            write_json(arguments.json, report.to_dict())
    if arguments.export is not None:
        print(f"wrote {arguments.export}: {save_plans(arguments.export)} plans")
