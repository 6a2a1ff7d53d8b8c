"""Scanning and measuring: what the report says, and that the model is left as it was."""

from __future__ import annotations

import copy
import io
import json

import pytest
import torch
from torch import nn

import upfold
from models import assert_same, decoder, snapshot, states
from upfold import InvalidArgument


def test_only_faster(monkeypatch):
    """The measured times decide; here the timer is told what to measure."""
    model, x = decoder()
    shapes = []

    def measured(functions, device, *, seconds):
        results = [function() for function in functions]
        torch.testing.assert_close(results[0], results[1])  # both competitors compute the layer
        shapes.append(tuple(results[0].shape))
        return [2.0, 1.0] if len(shapes) == 1 else [1.0, 2.0]

    monkeypatch.setattr("upfold.timing.medians", measured)
    report = upfold.replace(model, only_faster=x)
    assert shapes == [(2, 6, 10, 12), (2, 4, 20, 24)]
    assert states(report) == {"up": "replaced", "rest.2": "left alone"}
    assert "torch is faster here: upfold takes 2.00 times as long" in str(report)
    assert type(model.rest[2]) is nn.ConvTranspose2d
    assert {row.name: (row.torch_seconds, row.upfold_seconds) for row in report} == {
        "up": (2.0, 1.0),
        "rest.2": (1.0, 2.0),
    }


def test_only_faster_counts_calls_and_reads_output_size(monkeypatch):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.unused = nn.ConvTranspose2d(2, 2, 3, 2), nn.ConvTranspose2d(2, 2, 3, 2)
            self.unfold = nn.Unfold(2)
            self.fold = nn.Fold((6, 6), 2)

        def forward(self, x, *, size):
            y = self.up(x, output_size=size)
            return self.fold(self.unfold(y)) + self.up(x, size) + self.up(x, [6, 6])

    sizes = []

    def measured(functions, device, *, seconds):
        sizes.extend(tuple(function().shape) for function in functions)
        return [3.0, 1.0]

    monkeypatch.setattr("upfold.timing.medians", measured)
    model = Model()
    report = upfold.replace(model, only_faster={"x": torch.randn(1, 2, 2, 2), "size": [6, 6]})
    assert states(report) == {"up": "replaced", "unused": "left alone", "unfold": "replaced", "fold": "replaced"}
    rows = {row.name: row for row in report}
    assert (rows["up"].torch_seconds, rows["up"].upfold_seconds) == (9.0, 3.0)  # three calls alike, measured once
    assert "not measured" in rows["unused"].reason
    assert sizes == [(1, 2, 6, 6)] * 2 + [(1, 8, 25)] * 2 + [(1, 2, 6, 6)] * 2


def test_only_faster_leaves_what_upfold_refuses():
    model, x = decoder()
    with upfold.use(workspace_mb=1e-5):
        report = upfold.replace(model, only_faster=x, algorithm="gemm")
    assert states(report) == {"up": "left alone", "rest.2": "left alone"}
    assert "upfold refuses what reaches it: algorithm = 'gemm'" in report.rows[0].reason
    assert report.rows[0].torch_seconds is None  # nothing was measured


def test_only_faster_really_measures():
    model, x = decoder()
    report = upfold.replace(model, only_faster=(x,))
    for row in report:
        assert row.torch_seconds > 0
        assert row.upfold_seconds > 0
        assert row.state == ("replaced" if row.upfold_seconds < row.torch_seconds else "left alone")


def test_scan():
    model, x = decoder()
    model.train()
    before, random_state = snapshot(model), torch.get_rng_state()
    buffers = copy.deepcopy(dict(model.named_buffers()))
    report = upfold.scan(model, x)
    assert_same(before, snapshot(model))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())
    assert model.training
    assert states(report) == {"up": "torch", "rest.2": "torch"}
    up = report.rows[0]
    assert (up.layer, up.calls, up.parameters) == ("ConvTranspose2d", 1, 8 * 6 * 16 + 6)
    assert up.input_shapes == ((2, 8, 5, 6),)
    assert up.output_shapes == ((2, 6, 10, 12),)
    assert up.algorithm in upfold.algorithms()
    assert 0 < up.share < 1
    assert sum(row.seconds for row in report) < report.seconds
    assert up.why
    assert up.ratio == up.torch_seconds / up.upfold_seconds > 0
    whole = report.whole
    assert whole.reason is None
    assert min(whole.torch_seconds, whole.upfold_seconds) > 0
    assert whole.fused_seconds > 0
    assert whole.operations == 2  # a norm and an activation
    assert json.loads(report.to_json())["rows"][1]["name"] == "rest.2"
    assert json.loads(report.to_json())["whole"]["torch_seconds"] == whole.torch_seconds
    for text in ("rest.2", "ConvTranspose2d", "2x8x5x6", "share", "%", "x torch", "why", "whole model: torch", "were they free"):
        assert text in str(report)
    assert report.to_dict()["action"] == "scan"


def test_scan_without_inputs_or_layers():
    model, _ = decoder()
    report = upfold.scan(model)
    assert [row.calls for row in report] == [None, None]
    assert "2 layers" in str(report)
    assert "no transposed convolution" in str(upfold.scan(nn.Linear(2, 2)))
    for function in (upfold.scan, upfold.replace, upfold.restore):
        with pytest.raises(InvalidArgument, match=r"model = str; must be a torch\.nn\.Module"):
            function("decoder")
    with pytest.raises(InvalidArgument, match="inputs = int"):
        upfold.replace(model, only_faster=3)


def test_scan_runs_models_with_layers_that_it_cannot_watch():
    model = nn.Sequential(torch.jit.script(nn.ConvTranspose2d(3, 4, 2)), nn.LazyConvTranspose2d(5, 2, 2))
    scripted, lazy = upfold.scan(model, torch.randn(1, 3, 4, 4))
    assert (scripted.layer, scripted.state, scripted.calls) == ("ConvTranspose2d", "left alone", None)
    assert (lazy.state, lazy.parameters, lazy.calls) == ("torch", 4 * 5 * 4 + 5, 1)
    assert model.training
    assert model[0].training


def test_scan_cleans_up_after_a_failing_model():
    model, _ = decoder()
    model.train()
    before = snapshot(model)
    with pytest.raises(RuntimeError):
        upfold.scan(model, torch.randn(2, 4, 5, 6))
    assert_same(before, snapshot(model))


def test_report_as_a_table():
    consoles = pytest.importorskip("rich.console", reason="rich is an extra of the command line")
    model, x = decoder()
    console = consoles.Console(width=200, file=io.StringIO())
    console.print(upfold.scan(model, x))
    text = console.file.getvalue()
    assert "rest.2" in text
    assert "2x8x5x6" in text


def test_scan_of_the_whole_model_runs_torch_upfold_and_fused(monkeypatch):
    """What is timed against each other: torch's layers, upfold's, and the fused model, whatever the model was made of."""
    model, x = decoder()
    upfold.replace(model)
    before, seen = snapshot(model), {}

    def timed(models, call, seconds, least_runs):
        with torch.no_grad():
            results = {name: one(*call[0]) for name, one in models.items()}
        for result in results.values():
            torch.testing.assert_close(result, results["torch"], rtol=1e-4, atol=1e-5)
        seen.update({name: (type(one).__name__, type(one.up)) for name, one in models.items()})
        assert all(one.up.weight is model.up.weight for one in models.values())  # nothing is held twice
        return {"torch": 4.0, "upfold": 2.0, "fused": 1.0}

    monkeypatch.setattr("upfold.observe.time_models", timed)
    report = upfold.scan(model, x)
    assert_same(before, snapshot(model))
    assert seen["torch"] == ("Decoder", nn.ConvTranspose2d)
    assert seen["upfold"][0] == "Decoder"
    assert issubclass(seen["upfold"][1], upfold.ConvTranspose2d)
    assert seen["fused"][0] == "FusedDecoder"
    assert "whole model: torch 4000.00 ms, upfold 2000.00 ms (2.00x), fused 1000.00 ms (4.00x)" in str(report)


def test_scan_says_why_the_whole_model_was_not_timed():
    class Uncopied(nn.Sequential):
        def __deepcopy__(self, memo):
            raise TypeError("it holds a lock. And more")

    report = upfold.scan(Uncopied(nn.ConvTranspose2d(3, 4, 2)), torch.randn(1, 3, 4, 4))
    assert report.whole.torch_seconds is None
    assert "whole model: not measured, the model cannot be copied: it holds a lock" in str(report)
    assert upfold.scan(nn.Linear(2, 2), torch.randn(1, 2)).whole.reason == "no layer of it can be upfold's"


def test_chart_of_a_scan(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is an extra of the command line")
    from upfold.scan_chart import write_scan_chart

    model, x = decoder()
    path = write_scan_chart(upfold.scan(model, x), tmp_path / "scan.svg", "a model")
    text = path.read_text()
    for words in ("a model", "everything else", "rest.2", "torch's layers", "fused (2 operations)", "2x8x5x6"):
        assert words in text
    assert write_scan_chart(upfold.scan(nn.Sequential(nn.Unfold(2)), torch.randn(1, 2, 4, 4)), tmp_path / "few.png").is_file()
