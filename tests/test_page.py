"""The comparison page: one file that needs nothing else and holds every figure, losses and failures included."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from upfold import InvalidArgument, cli, overview

pytest.importorskip("matplotlib", reason="matplotlib is an extra of the command line")

from test_cli import bench_facts
from upfold import page
from upfold.models.result import LayerTime, ModelResult, Variant

H200 = Path(__file__).parent.parent / "benchmarks" / "results" / "nvidia-h200.json"


class Reader(HTMLParser):
    """Checks that what is opened is closed, and collects cells and addresses."""

    VOID = ("meta", "link", "br", "img", "use", "path")

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value]

    def handle_startendtag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(facts, folder):
    path = page.write_page(facts, folder)
    assert path == folder / "index.html"
    text = path.read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert all(address.startswith("#") for address in reader.addresses)  # nothing is fetched
    assert not re.search(r"url\((?!#)|@import|<script", text)
    return text, "\n".join(reader.text)


def test_a_run(tmp_path):
    facts = {**bench_facts(("one", "two")), "failures": ["one: gemm: <wrong>; repro: upfold compare"], "time": "2024-01-02T03"}
    html, text = read(facts, tmp_path / "new" / "folder")
    assert html.count("<svg") == 3  # without ceilings there is no roofline
    for word in ("a GPU", "float32 tf32", "2024-01-02", "decoders", "n2 8x8", "20.0", "2.00x", "one: gemm: <wrong>"):
        assert word in text
    assert "<wrong>" not in html  # escaped
    assert '<td class="best" title="3.00 µs">3.0</td>' in html
    assert '<td class="loss">0.50</td>' in html  # behind the fastest peer


def test_several_runs_have_a_section_each(tmp_path):
    runs = {"first": bench_facts(("one",)), "second": {**bench_facts(("one",), mode="grad_input"), "dtype": "bfloat16"}}
    html, text = read({**runs, "note": "not a run"}, tmp_path)
    assert re.findall(r'<section id="(\w+)"', html) == ["first", "second"]
    assert "bfloat16 tf32 grad_input" in text


@pytest.mark.skipif(not H200.is_file(), reason="no source tree here")
def test_the_figures_of_the_repository(tmp_path):
    facts = json.loads(H200.read_text())
    html, text = read(facts, tmp_path)
    assert html.count("<section") == len(facts)
    assert "Roofline" in text
    for layer in overview.run_of(facts["float32"]).layers:
        assert text.count(layer.name) >= 3  # in charts, in the table and in the line that repeats it


def models_facts(on_gpu=True):
    """A run of the suite of whole models: one measured in four ways, of which one is wrong, and one not measured."""
    shared = ("float32", "tf32", "contiguous", "upfold bench --suite models --model one")
    one = ModelResult("one", "somebody <else>", "2x8x1x1", *shared, parameters=7, bound=1e-6, share=0.72)
    one.layers = [LayerTime("up", "gemm", 2e-3, 1e-3)]
    for layers, way, seconds in (("torch", "eager", 8e-3), ("replaced", "eager", 4e-3), ("fused", "eager", 1e-2)):
        sizes = {"device_seconds": seconds / 2, "how": "graph", "peak_bytes": 3 * 2**20, "held_bytes": 0} if on_gpu else {}
        one.variants.append(Variant(layers, way, 1e-7, seconds, 0.0, **sizes))
    one.variants.append(Variant("fused", "compiled", 1.0, note="WRONG: error 1.0e+00 above 1.0e-06", failed=True))
    two = ModelResult("two", "another", "1x3", *shared, reason="monai is not installed")
    run = {"device": "a GPU", "dtype": "float32", "precision": "tf32", "layout": "contiguous", "suites": {}}
    return {**run, "failures": one.failures, "models": [one.to_dict(), two.to_dict()]}


@pytest.mark.parametrize("on_gpu", [True, False])
def test_whole_models(tmp_path, on_gpu):
    html, text = read(models_facts(on_gpu), tmp_path)
    assert html.count("<svg") == (2 if on_gpu else 1)
    assert "float32 tf32 whole models" in text
    assert "one: somebody <else>; 2x8x1x1, 72% of it in transposed convolutions" in text
    assert "two: another; 1x3: not measured, monai is not installed" in text
    assert "2.00x  4.00 ms" in text  # in the chart
    assert '<td class="loss">0.80</td>' in html  # fused, against torch
    assert text.count("WRONG: error 1.0e+00 above 1.0e-06") == 2  # in the table and among the failures
    assert "replaced against torch eager: geometric mean of 1 models, 0 slower" in text
    assert ("3.0 MiB" in text) == on_gpu


def test_layers_and_models_of_one_run_share_a_section(tmp_path):
    html, text = read({**models_facts(), **bench_facts(("one",))}, tmp_path)
    assert html.count("<section") == 1
    assert "Gain on each layer" in text
    assert "What is gained end to end" in text


def test_charts_and_tables_of_models_from_files(tmp_path, capsys):
    first, second, chart = tmp_path / "first.json", tmp_path / "second.json", tmp_path / "models.svg"
    first.write_text(json.dumps(models_facts()))
    second.write_text(json.dumps({"last": {**models_facts(False), "layout": "channels_last"}, "layers": bench_facts(("one",))}))
    words = ["chart", str(first), str(second), "--suite", "models"]
    assert cli.main(words) == 0
    contiguous, last = capsys.readouterr().out.split("\n\na GPU, ")
    assert contiguous.startswith("a GPU, float32 tf32, contiguous")
    assert "| one 2x8x1x1 | 72% | 8.00 ms | 2.00x | 0.80x | 3 MiB | 3 MiB | 3 MiB |" in contiguous
    assert "two: not measured, monai is not installed" in contiguous
    assert last.startswith("float32 tf32, channels_last")
    assert "| one 2x8x1x1 | 72% | 8.00 ms | 2.00x | 0.80x |\n" in last
    assert cli.main([*words, "--chart", str(chart)]) == 0
    text = chart.read_text()
    assert "float32 tf32, contiguous" in text
    assert "float32 tf32, channels_last" in text
    assert cli.main([*words, "--run", "last", "--report", str(tmp_path / "out"), "--chart", str(chart)]) == 0
    html = (tmp_path / "out" / "index.html").read_text()
    assert re.findall(r'<section id="(\w+)"', html) == ["first", "last", "layers"]
    capsys.readouterr()
    assert cli.main([*words, "--run", "nothing"]) == 2
    assert "run = 'nothing'; of whole models the file has first, last" in capsys.readouterr().err
    (tmp_path / "layers.json").write_text(json.dumps(bench_facts(("one",))))
    assert cli.main(["chart", str(tmp_path / "layers.json"), "--suite", "models"]) == 2
    assert "holds no whole models" in capsys.readouterr().err


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="no suites of layers or models to show"):
        page.write_page({"machine": {}}, tmp_path)
    path = tmp_path / "empty.json"
    path.write_text("{}")
    assert cli.main(["chart", str(path), "--report", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    assert cli.main(["bench", "--suite", "host", "--report", str(tmp_path / "out")]) == 2
