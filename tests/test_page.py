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


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="no suites of layers to show"):
        page.write_page({"machine": {}}, tmp_path)
    path = tmp_path / "empty.json"
    path.write_text("{}")
    assert cli.main(["chart", str(path), "--report", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    assert cli.main(["bench", "--suite", "host", "--report", str(tmp_path / "out")]) == 2
