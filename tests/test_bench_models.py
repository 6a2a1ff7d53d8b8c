"""The suite of whole models: every way is checked before it is timed, and what does not run says why. No test asserts a speed."""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import sys

import pytest
import torch
from torch import nn

from upfold import cli, timing
from upfold.models import MODELS, ModelCase, Size, by_name, measure, networks
from upfold.models.result import LAYERS, LayerTime, ModelResult, Variant, summarize
from upfold.models.rule import allowed_error, error_norm, in_double, in_tf32

pytest.importorskip("rich", reason="the bench's tables need rich")

from upfold import bench
from upfold.models.tables import print_model, print_models_summary

CPU = torch.device("cpu")
QUICK = measure.Conditions(torch.float32, CPU, seconds=0.002, compiled=False)


@pytest.fixture(autouse=True)
def _short_measuring_of_layers(monkeypatch):
    monkeypatch.setattr(sys.modules["upfold.replace"], "_SECONDS_EACH", 0.001)  # the function has the module's name


def installed(case):
    if case.package is not None:
        pytest.importorskip(case.package, reason=f"{case.package} is an extra of the tests (models)")
    return case


def shown(*results):
    from rich.console import Console

    console = Console(file=io.StringIO(), width=200)
    for result in results:
        print_model(console, result)
    print_models_summary(console, results)
    return console.file.getvalue()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_every_model_runs_in_all_eager_ways(case, dtype, layout):
    conditions = dataclasses.replace(QUICK, dtype=dtype, layout=layout)
    result = measure.run_model(installed(case), conditions)
    if layout == "channels_last" and case.axes == 1:
        assert result.reason == "its tensors have one spatial axis, and so no channels_last"
        return
    assert result.reason is None
    assert [one.name for one in result.variants] == list(LAYERS)
    for one in result.variants:
        assert one.note == "" or "layer" in one.note, one
        assert one.error <= result.bound
        assert one.seconds > 0
    assert len(result.layers) == sum(isinstance(part, nn.modules.conv._ConvTransposeNd) for part in small(case).modules())
    assert result.share > 0
    assert result.failures == []
    facts = json.loads(json.dumps(result.to_dict()))
    assert facts["variants"][1]["x_torch"] == pytest.approx(result.variants[0].seconds / result.variants[1].seconds)
    assert case.name in shown(result)


def small(case):
    return case.build(case.small, torch.float32, CPU, "contiguous")[0]


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_published_sizes_have_their_layers(case):
    """On the device of shapes, so that nothing is computed."""
    installed(case)
    with torch.device("meta"):
        model = case.make(**case.published.options)
    wide = sum(parameter.numel() for parameter in model.parameters())
    published = {"dcgan": 3.6e6, "pix2pix": 54.4e6, "pix2pix-one": 54.4e6, "unet": 31.0e6, "sam": 4.06e6, "encodec": 7.4e6}
    assert wide == pytest.approx(published.get(case.name, wide), rel=0.02)


def test_the_layout_is_that_of_weights_and_inputs():
    case = by_name("pix2pix")
    model, (x,) = case.build(case.small, torch.float32, CPU, "channels_last")
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert model.enter.weight.is_contiguous(memory_format=torch.channels_last)
    again, (same,) = case.build(case.small, torch.float32, CPU, "contiguous")
    assert torch.equal(x, same)
    assert torch.equal(model.enter.weight, again.enter.weight)


class Spoiled(nn.Sequential):
    """A generator that is wrong, or breaks, where its layers are upfold's."""

    error: Exception | None = None

    def forward(self, x):
        y = super().forward(x)
        if type(self[0]) is nn.ConvTranspose2d:
            return y
        if self.error is not None:
            raise self.error
        return y * 1.001


def spoiled(error=None):
    kind = type("Spoiled", (Spoiled,), {"error": error})
    return ModelCase("spoiled", "here", lambda: kind(*networks.dcgan()), Size({}, ((2, 8, 1, 1),)), Size({}, ((2, 8, 1, 1),)))


def test_a_wrong_result_is_a_failure_and_not_timed():
    result = measure.run_model(spoiled(), QUICK)
    torchs, replaced, _ = result.variants
    assert torchs.seconds > 0
    assert replaced.seconds is None
    assert replaced.note.startswith("WRONG: error 1.0e-03 above ")
    assert [text.partition("; repro: ")[2] for text in result.failures] == ["upfold bench --suite models --model spoiled"] * 2
    assert "WRONG" in shown(result)


class Lazy(nn.Sequential):
    """Answers with what its copy with torch's layers has answered, as if it were given that memory and wrote nothing."""

    results: list[torch.Tensor]

    def forward(self, x):
        if type(self[0]) is nn.ConvTranspose2d:
            self.results.append(super().forward(x))
        return self.results[-1]


def test_a_model_that_writes_nothing_is_found_out():
    kind = type("Lazy", (Lazy,), {"results": []})
    lazy = ModelCase("lazy", "here", lambda: kind(*networks.dcgan()), Size({}, ((2, 8, 1, 1),)), Size({}, ((2, 8, 1, 1),)))
    torchs, *others = measure.run_model(lazy, QUICK).variants
    assert torchs.seconds > 0
    assert [one.note.split(":")[0] for one in others] == ["WRONG"] * 2


@pytest.mark.parametrize("error, failures", [(RuntimeError("it\nbreaks"), 2), (torch.cuda.OutOfMemoryError("full"), 0)], ids=str)
def test_what_breaks_is_told(error, failures):
    result = measure.run_model(spoiled(error), QUICK)
    assert result.variants[0].seconds > 0
    for one in result.variants[1:]:
        assert one.seconds is None
        assert one.note.startswith(f"FAILED: {type(error).__name__}: {str(error).split()[0]}")
    assert len(result.failures) == failures
    assert "FAILED" in shown(result)


@pytest.mark.parametrize("at_once", [True, False])
def test_without_a_compiler_the_eager_ways_are_timed_all_the_same(monkeypatch, at_once):
    def backend(*graph, **options):
        raise RuntimeError("no compiler here")

    if at_once:
        monkeypatch.setattr(torch, "compile", backend)
    result = measure.run_model(by_name("dcgan"), dataclasses.replace(QUICK, compiled=True, backend=backend))
    assert [one.name for one in result.variants if one.seconds] == list(LAYERS)
    assert all("no compiler here" in one.note for one in result.variants if one.way == "compiled")
    assert result.failures == []  # torch's layers cannot be compiled either
    assert "no compiler here" in shown(result)


@pytest.mark.slow
def test_compiled_ways():
    result = measure.run_model(by_name("pix2pix"), dataclasses.replace(QUICK, compiled=True, backend="aot_eager"))
    assert [one.name for one in result.variants] == [f"{name}{way}" for name in LAYERS for way in ("", " compiled")]
    assert all(one.seconds > 0 for one in result.variants), [one.note for one in result.variants]
    compiled = result.figures(result.find("fused", "compiled"))
    assert compiled["x_torch"] == pytest.approx(result.variants[1].seconds / result.variants[5].seconds)
    assert compiled["x_torch_eager"] == pytest.approx(result.variants[0].seconds / result.variants[5].seconds)


@pytest.mark.parametrize("name", ["monai", "transformers"])
def test_a_missing_package_is_named(monkeypatch, name):
    original = importlib.import_module

    def missing(path, *rest):
        if path.partition(".")[0] == name:
            raise ModuleNotFoundError(f"No module named '{path}'", name=name)
        return original(path, *rest)

    monkeypatch.setattr(importlib, "import_module", missing)
    case = next(case for case in MODELS if case.package == name)
    result = measure.run_model(case, QUICK)
    assert result.reason == f"{name} is not installed; pip install 'upfold[models]' brings it"
    assert result.variants == result.failures == []
    assert result.reason in shown(result)
    assert summarize([result]) == {}


def test_a_model_that_cannot_be_built_or_run_says_why():
    def broken():
        raise TypeError("another version takes other words")

    size = Size({}, ((1, 3),))
    result = measure.run_model(ModelCase("broken", "here", broken, size, size), QUICK)
    assert result.reason == "it cannot be built: TypeError: another version takes other words"
    result = measure.run_model(ModelCase("narrow", "here", lambda: nn.Linear(4, 4), size, size), QUICK)
    assert result.reason.startswith("torch does not run it: RuntimeError: ")


def test_rounding_every_product_to_tf32_is_seen_in_the_result():
    model, inputs = by_name("unet").build(by_name("unet").small, torch.float32, CPU, "contiguous")
    exact = in_double(model, *inputs)
    with torch.no_grad():
        plain = model(*inputs)
    assert error_norm(plain, exact) < 1e-6
    assert 1e-5 < error_norm(in_tf32(model, *inputs), exact) < 1e-2
    assert allowed_error(plain, exact) < 3e-6


def test_latency_waits_for_each_call():
    calls = []
    (first, second) = timing.latencies([lambda: calls.append("a"), lambda: calls.append("b")], "cpu", seconds=0.001)
    assert first.how == second.how == "wall"
    assert calls[:4] == ["a", "a", "b", "b"]  # two to warm up, then in turns
    assert calls[4:6] == ["a", "b"]


def test_figures_and_summary():
    def result(times, **facts):
        variants = [Variant(*name.split("-"), seconds=seconds, peak_bytes=facts.get(name)) for name, seconds in times.items()]
        return ModelResult("m", "here", "1x3", "float32", "tf32", "contiguous", "upfold bench", variants=variants)

    one = result({"torch-eager": 4.0, "torch-compiled": 3.0, "fused-eager": 2.0, "fused-compiled": 6.0}, **{"torch-eager": 8})
    assert one.figures(one.find("fused")) == {
        "x_torch": 2.0,
        "x_torch_eager": 2.0,
        "x_torch_device": None,
        "x_torch_eager_device": None,
        "memory_x_torch": None,
    }
    assert one.figures(one.find("fused", "compiled"))["x_torch"] == 0.5
    found = summarize([one, result({"torch-eager": 8.0, "fused-eager": 1.0}), result({"fused-eager": 1.0})])
    assert found["fused"]["x_torch"] == {"geometric_mean": pytest.approx(4.0), "models": 2, "worst": 2.0, "slower": 0}
    assert found["fused compiled"]["x_torch"]["slower"] == 1
    assert "torch" not in found
    one.layers = [LayerTime("up", "gemm", 2.0, 1.0), LayerTime("last", "direct", 1.0, 0.5)]
    one.share = 0.75
    text = shown(one)
    assert "2 transposed convolutions, 75% of the model's time with torch: torch 3.00 s, upfold 1.50 s (gemm, direct)" in text


def test_bench_writes_each_model_as_soon_as_it_is_measured(tmp_path, monkeypatch):
    file, seen = tmp_path / "models.json", []
    original = bench.run_model

    def watched(case, conditions):
        seen.append(len(json.loads(file.read_text())["models"]) if file.exists() else 0)
        return original(case, conditions)

    monkeypatch.setattr(bench, "run_model", watched)
    words = ["bench", "--suite", "models", "--model", "dcgan", "unet", "--no-compile", "--seconds", "0.001", "--json", str(file)]
    assert cli.main([*words, "--dtype", "bfloat16", "--layout", "channels_last"]) == 0
    assert seen == [0, 1]
    facts = json.loads(file.read_text())
    assert facts["dtype"], facts["layout"] == ("bfloat16", "channels_last")
    assert [model["name"] for model in facts["models"]] == ["dcgan", "unet"]
    for model in facts["models"]:
        words = f"upfold bench --suite models --model {model['name']} --dtype bfloat16 --layout channels_last"
        assert model["repro"] == words
        assert [one["variant"] for one in model["variants"]] == list(LAYERS)
    assert facts["models_summary"]["fused"]["x_torch"]["models"] == 2


def test_bench_draws_models(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is an extra of the command line")
    words = ["bench", "--suite", "models", "--model", "dcgan", "--no-compile", "--seconds", "0.001"]
    assert cli.main([*words, "--chart", str(tmp_path / "models.png"), "--report", str(tmp_path / "out")]) == 0
    assert (tmp_path / "models.png").read_bytes().startswith(b"\x89PNG")
    assert "whole models" in (tmp_path / "out" / "index.html").read_text()
    assert f"wrote {tmp_path / 'models.png'}" in capsys.readouterr().out


def test_an_unknown_model_is_refused(capsys):
    assert cli.main(["bench", "--suite", "models", "--model", "lenet"]) == 2
    assert "model = 'lenet'; no such model; known: dcgan, pix2pix" in capsys.readouterr().err


def test_all_leaves_the_models_out():
    assert bench.names_of(["all"]) == bench.SUITES
    assert bench.names_of(["fold", "all", "models"]) == ("fold", *(name for name in bench.SUITES if name != "fold"), "models")
