"""Tuning: what is timed, in which order, and what the winner is good for.

No test here depends on a time: where one decides, the clock is told what to read.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import upfold
from models import decoder
from tuning import TUNE, Clock, X, forget, in_file, layer, own_folder, remember, runs, told_clock
from upfold import InvalidArgument, cli, execute
from upfold.algorithms import REGISTRY

folder = pytest.fixture(autouse=True)(own_folder)
clock = pytest.fixture(told_clock)


# --- what a tune does ------------------------------------------------------------------------------------------------


def test_the_winner_is_remembered_and_used(clock, folder):
    model = layer()
    assert runs(model).algorithm == "direct"
    y = model(X)
    report = upfold.tune(model, X)
    assert [row.state for row in report] == ["tuned"]
    assert report.rows[0].ranking == (("gemm", 0, 1e-3), ("direct", 0, 2e-3), ("torch", 0, 3e-3))
    assert (report.rows[0].untuned, report.rows[0].untuned_seconds) == ("direct#0", 2e-3)
    plan = runs(model)
    assert plan.algorithm == "gemm"
    assert plan.reason == "tuned: measured 1000 us; direct 2000 us, torch 3000 us"
    assert torch.equal(model(X), upfold.conv_transpose2d(X, model.weight, model.bias, 2, 1, algorithm="gemm"))
    torch.testing.assert_close(model(X), y)
    assert [entry["ranking"][0]["algorithm"] for entry in in_file(folder).values()] == ["gemm"]
    assert sorted(file.name for file in folder.iterdir() if not file.name.endswith(".lock")) == ["plans-1.json"]
    with upfold.use(tuned=False):
        assert runs(model).algorithm == "direct"


def test_it_takes_effect_on_a_shape_that_ran_before(clock):
    model = layer()
    with torch.no_grad():
        model(X)
        upfold.tune(model, X)
        launch_keys = len(execute._launches)
        y = model(X)
    assert (launch_keys, len(execute._launches)) == (0, 1)
    assert torch.equal(y, upfold.conv_transpose2d(X, model.weight, model.bias, 2, 1, algorithm="gemm"))


STARTED = """
import torch, upfold
layer = upfold.ConvTranspose2d(4, 3, 4, 2, 1)
print(upfold.explain(layer, torch.randn(2, 4, 12, 13)).plan.algorithm)
"""


def started(code=STARTED, **environment):
    found = dict(os.environ, **environment)
    threads = f"import torch; torch.set_num_threads({torch.get_num_threads()})\n"
    done = subprocess.run([sys.executable, "-c", threads + code], env=found, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout.strip()


def test_a_new_process_takes_it_over(clock):
    upfold.tune(layer(), X)
    assert started() == "gemm"
    assert started(UPFOLD_TUNED="0") == "direct"
    assert started(UPFOLD_CACHE_DIR=os.path.join(os.environ["UPFOLD_CACHE_DIR"], "elsewhere")) == "direct"


def test_torch_wins_where_it_may(clock, monkeypatch):
    clock.seconds = {"torch": 1e-3, "direct": 3e-3, "gemm": 2e-3}
    model = layer()
    report = upfold.tune(model, X)
    assert "torch#0" in str(report)
    assert runs(model).algorithm == "torch"
    assert runs(model).reason.startswith("tuned: measured 1000 us; gemm 2000 us")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")  # it was chosen, it does not stand in
        y = model(X)
    assert torch.equal(y, nn.functional.conv_transpose2d(X, model.weight, model.bias, 2, 1))
    with upfold.use(fallback=False):
        assert runs(model).algorithm == "gemm"  # the fastest of the others
    forget()
    monkeypatch.setenv("UPFOLD_FALLBACK", "0")
    assert runs(model).algorithm == "gemm"


def test_torch_is_no_candidate_where_it_is_forbidden(clock):
    with upfold.use(fallback=False):
        upfold.tune(layer(), X)
    assert {name for name, _ in clock.timed} == {"gemm", "direct"}


def test_torch_runs_only_where_it_was_the_fastest():
    remember(("gemm", 7, 1e-3), ("torch", 0, 2e-3), ("direct", 0, 3e-3))
    assert runs(layer()).algorithm == "direct"  # gemm has no such config


def test_every_algorithm_and_config_is_timed(clock, monkeypatch):
    monkeypatch.setattr(REGISTRY["direct"], "configs", lambda problem, device: (0, 4, 2))
    clock.seconds.update(direct_2=5e-4)
    report = upfold.tune(layer(), X)
    assert clock.heats[0] == ("forward", [("direct", 0), ("gemm", 0), ("torch", 0)])  # best guesses first
    assert clock.heats[1] == ("forward", [("gemm", 0), ("direct", 4), ("direct", 2)])  # beside the fastest so far
    assert report.rows[0].ranking[0] == ("direct", 2, 5e-4)
    assert (report.rows[0].timed, report.rows[0].not_reached) == (5, 0)
    assert runs(layer()).config == 2


def test_times_of_a_later_heat_are_scaled_by_the_leader(monkeypatch):
    """The machine ran at half its pace in the second heat: a config that took 1.2 ms then is faster than 1 ms before."""
    heats = iter([[1e-3, 5e-3, 5e-3], [2e-3, 1.2e-3]])
    monkeypatch.setattr(REGISTRY["direct"], "configs", lambda problem, device: (0, 1))
    monkeypatch.setattr(TUNE, "_times", lambda *arguments: next(heats))
    best = upfold.tune(layer(), X).rows[0].ranking[0]
    assert best[:2] == ("direct", 1)
    assert best.seconds == pytest.approx(6e-4)


def test_algorithms_can_be_named(clock, folder):
    upfold.tune(layer(), X, algorithms=["direct", "torch"])
    assert {name for name, _ in clock.timed} == {"direct", "torch"}
    assert [entry["complete"] for entry in in_file(folder).values()] == [False]
    for names in (["gemm_atomic"], ["winograd"], "auto"):
        with pytest.raises(InvalidArgument, match=r"each must be one of 'gemm', 'direct', 'torch'"):
            upfold.tune(layer(), X, algorithms=names)
    for seconds in (0, -1, float("inf"), float("nan")):
        with pytest.raises(InvalidArgument, match=r"seconds = .*; must be positive"):
            upfold.tune(layer(), X, seconds=seconds)


@pytest.mark.parametrize(("activation", "with_gradients"), [("relu", [True]), ("gelu", [True, False])])
def test_gradients_are_tuned_where_asked_for(activation, with_gradients, clock):
    """What the derivative of a gelu is made of is not its result: with gradients torch applies it, apart."""
    model = nn.Sequential(layer(activation=activation), nn.ConvTranspose2d(3, 2, 3, 2))
    assert [row.operator for row in upfold.tune(model, X)] == ["forward", "forward"]
    report = upfold.tune(model, X, gradients=True, again=True)
    first = [row for row in report if row.layers == ("0",)]
    assert [row.operator for row in first] == ["forward"] * len(with_gradients) + ["grad_input", "grad_weight"]
    assert [activation in row.problem for row in first] == [*with_gradients, False, False]
    upfold.replace(model)
    x = X.clone().requires_grad_()
    ran = []
    original = REGISTRY["direct"].run
    REGISTRY["direct"].run = lambda *arguments: ran.append(arguments[0]) or original(*arguments)
    try:
        model(x).square().sum().backward()
    finally:
        del REGISTRY["direct"].run
    assert not ran  # gemm was the faster in all


def test_layers_alike_are_timed_once_and_named_together(clock):
    model = nn.Sequential(layer(), nn.Conv2d(3, 4, 3, 2, 1), layer())
    report = upfold.tune(model, X)
    assert [row.layers for row in report] == [("0", "2")]
    assert len(clock.heats) == 1
    assert "0, 2" in str(report)


def test_a_plan_that_is_known_is_not_measured_again(clock):
    upfold.tune(layer(), X)
    report = upfold.tune(layer(), X)
    assert (len(clock.heats), [row.state for row in report]) == (1, ["known"])
    assert "1 known before" in str(report)
    upfold.tune(layer(), X, again=True)
    assert len(clock.heats) == 2


def test_the_time_is_kept_and_what_it_did_not_reach_is_told(monkeypatch):
    clock, now = Clock(gemm=1.0, direct=2.0, torch=3.0), [0.0]

    def times(*arguments):
        now[0] += 10.0
        return clock(*arguments)

    monkeypatch.setattr(TUNE, "_times", times)
    monkeypatch.setattr(TUNE, "_now", lambda: now[0])
    model = nn.Sequential(layer(), nn.ConvTranspose2d(3, 2, 3, 2), nn.ConvTranspose2d(2, 2, 3, 2))
    report = upfold.tune(model, X, seconds=15)
    assert [row.state for row in report] == ["tuned", "tuned", "not reached"]
    assert [row.not_reached for row in report] == [0, 0, 3]
    assert "15 s did not reach 3 of 9 candidates" in str(report)
    assert [row.state for row in upfold.tune(model, X, seconds=15)] == ["known", "known", "tuned"]


def test_an_unfinished_plan_is_used_and_finished_later(monkeypatch):
    found = iter([[2e-3, 1e-3, None], [2e-3, 1e-3, 5e-4]])
    monkeypatch.setattr(TUNE, "_times", lambda *arguments: next(found))
    report = upfold.tune(layer(), X)
    assert (report.rows[0].state, report.rows[0].not_reached) == ("tuned", 1)
    assert runs(layer()).algorithm == "gemm"
    assert upfold.tune(layer(), X).rows[0].state == "tuned"
    assert runs(layer()).algorithm == "torch"


def test_one_time_alone_decides_nothing(monkeypatch, folder):
    monkeypatch.setattr(TUNE, "_times", lambda *arguments: [1e-3, None, None])
    assert [row.state for row in upfold.tune(layer(), X)] == ["not reached"]
    assert not folder.exists()


def test_an_interruption_leaves_what_was_measured(clock, monkeypatch, folder):
    def times(*arguments):
        if clock.heats:
            raise KeyboardInterrupt
        return clock(*arguments)

    monkeypatch.setattr(TUNE, "_times", times)
    model, x = decoder()
    with pytest.raises(KeyboardInterrupt):
        upfold.tune(model, x)
    assert len(in_file(folder)) == 1
    assert runs(model.up, torch.randn(2, 8, 5, 6)).algorithm == "gemm"


def test_it_really_measures(folder, monkeypatch):
    monkeypatch.setattr(TUNE, "_MOST_SECONDS_EACH", 0.002)
    model, x = decoder()
    before = torch.get_rng_state()
    report = upfold.tune(model, x, gradients=True)
    assert torch.equal(before, torch.get_rng_state())
    assert [row.layers for row in report] == [("up",)] * 3 + [("rest.2",)] * 3
    assert all(row.state == "tuned" for row in report)
    assert {row.timed for row in report} <= {3, 4}  # fused takes no layer of 3 channels forward
    assert all(one.seconds > 0 for row in report for one in row.ranking)
    assert len(in_file(folder)) == 6
    assert json.loads(json.dumps(report.to_dict()))["rows"][0]["ranking"][0]["seconds"] > 0
    assert f"plans in {folder}" in str(report)


def test_what_cannot_run_drops_out(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("not implemented for this type")

    monkeypatch.setattr(REGISTRY["torch"], "run", broken)
    row = upfold.tune(layer(), X, seconds=1).rows[0]
    assert (row.state, row.not_reached, {one.algorithm for one in row.ranking}) == ("tuned", 0, {"gemm", "direct"})


def test_a_slow_heat_stops_at_the_deadline(monkeypatch):
    """By the trial's time only two of three fit; the timer is then asked for those alone."""
    now = [0.0]

    def clock():
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(TUNE, "_now", clock)
    monkeypatch.setattr("upfold.timing.medians", lambda works, device, *, seconds: [1e-3] * len(works))
    row = upfold.tune(layer(), X, seconds=8).rows[0]
    assert (row.timed, row.not_reached) == (2, 1)


def test_memory_that_runs_out_is_shared_less(monkeypatch):
    """As on a GPU, whose graphs hold the results of all data sets: then one by one, on one data set each."""
    asked = []

    def medians(works, device, *, seconds):
        asked.append([len(work) for work in works])
        if len(works) > 1:
            raise torch.cuda.OutOfMemoryError
        return [float(len(asked))]

    monkeypatch.setattr("upfold.timing.data_sets", lambda size, device: 2)
    monkeypatch.setattr("upfold.timing.medians", medians)
    row = upfold.tune(layer(), X, seconds=100).rows[0]
    assert asked == [[2, 2, 2], [1], [1], [1]]
    assert [one.seconds for one in row.ranking] == [2.0, 3.0, 4.0]


def test_layers_of_their_own_are_left_alone(clock):
    model = nn.Sequential(layer(algorithm="gemm"), nn.ConvTranspose2d(3, 3, 3, dtype=torch.float32))
    assert [(row.state, row.reason) for row in upfold.tune(model, X)] == [
        ("left alone", "asks for gemm by name"),
        ("tuned", None),
    ]
    with upfold.use(workspace_mb=1e-5):
        report = upfold.tune(layer(), X, algorithms=["gemm"])
    assert report.rows[0].reason == "none of the algorithms asked for accepts it"
    assert "no transposed convolution ran" in str(upfold.tune(nn.Linear(3, 3), torch.randn(1, 3)))
    assert len(upfold.tune(layer(), torch.randn(0, 4, 5, 5))) == 0


# --- the command line ------------------------------------------------------------------------------------------------


def test_command_line(clock, capsys, tmp_path, monkeypatch):
    words = ["tune", "upfold.decoder:build", "--input", "1x3x32x32", "--seconds", "5", "--gradients"]
    file, report = str(tmp_path / "plans.json"), str(tmp_path / "report.json")
    assert cli.main([*words, "--export", file, "--json", report]) == 0
    out = capsys.readouterr().out
    assert "grad_weight" in out
    assert f"wrote {file}: " in out
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert {row["state"] for row in rows} == {"tuned"}
    monkeypatch.setenv("UPFOLD_CACHE_DIR", str(tmp_path / "elsewhere"))
    forget()
    assert cli.main(["tune", "--import", file]) == 0
    assert f"{file}: {len(rows)} plans for the devices of this machine" in capsys.readouterr().out
    assert cli.main(["info"]) == 0
    assert f"{len(rows)} for this machine, in {tmp_path / 'elsewhere'}" in capsys.readouterr().out
    monkeypatch.setenv("UPFOLD_TUNED", "0")
    assert cli.main(["info"]) == 0
    assert "not used: UPFOLD_TUNED is off" in capsys.readouterr().out


def test_a_terminal_gets_a_progress_bar(clock, monkeypatch):
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for wanted in (True, False):
        monkeypatch.setattr(sys, "stderr", Terminal())
        upfold.tune(nn.Sequential(layer()), X, progress=wanted, again=True)
        assert ("3/3" in sys.stderr.getvalue()) == wanted
        assert ("timed 0" in sys.stderr.getvalue()) == wanted
