"""Tuning: what is timed, what is remembered, by what it is found again, and what becomes of a file that others touch.

No test here depends on a time: where one decides, the clock is told what to read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch import nn

import upfold
from models import decoder
from upfold import InvalidArgument, cli, dispatch, execute, plans
from upfold.algorithms import REGISTRY
from upfold.plans import Measured, Ranking, bucket, problem_key

CPU = torch.device("cpu")
# `upfold.tune` is the function; its module is found by name alone.
TUNE = sys.modules["upfold.tune"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A cache folder of the test's own, and no plan from elsewhere, before and after."""
    monkeypatch.setenv("UPFOLD_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache"
    forget()


def forget():
    """As in a process that has just started."""
    plans.forget()
    dispatch.forget()
    execute.forget()


class Clock:
    """Stands in for the timing: seconds by algorithm or by (algorithm, config), and a list of what was timed."""

    def __init__(self, **seconds):
        self.seconds, self.heats = seconds, []

    def __call__(self, subject, ways, seconds, deadline):
        self.heats.append((subject.mode, list(ways)))
        return [self.seconds.get(f"{name}_{config}", self.seconds.get(name, 1.0)) for name, config in ways]

    @property
    def timed(self):
        return [way for _, heat in self.heats for way in heat]


@pytest.fixture
def clock(monkeypatch):
    """Direct is predicted to be the fastest of the layer below; here gemm is."""
    clock = Clock(gemm=1e-3, direct=2e-3, torch=3e-3)
    monkeypatch.setattr(TUNE, "_times", clock)
    return clock


def layer(**options):
    torch.manual_seed(0)
    return upfold.ConvTranspose2d(4, 3, 4, 2, 1, **options)


X = torch.randn(2, 4, 12, 13)


def runs(module, x=X):
    return upfold.explain(module, x).plan


def problem(x=X, module=None):
    return upfold.explain(module or layer(), x).problem


def in_file(folder):
    """The plans of the file, of all machines together."""
    document = json.loads((folder / "plans-1.json").read_text())
    return {key: entry for device in document["devices"] for key, entry in device["plans"].items()}


def remember(*measured, of=None):
    """Put a ranking for a problem into the file, as a process of before would have."""
    ranking = Ranking(tuple(Measured(*one) for one in measured))
    plans.remember({plans.machine_of(CPU): {problem_key(of or problem(), CPU): ranking}})
    forget()


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
    assert dispatch.untuned(problem(), CPU).algorithm == "direct"


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


def test_gradients_are_tuned_where_asked_for(clock):
    model = nn.Sequential(layer(activation="relu"), nn.ConvTranspose2d(3, 2, 3, 2))
    assert [row.operator for row in upfold.tune(model, X)] == ["forward", "forward"]
    report = upfold.tune(model, X, gradients=True, again=True)
    first = [row for row in report if row.layers == ("0",)]
    # With gradients the activation is applied apart.
    assert [row.operator for row in first] == ["forward", "forward", "grad_input", "grad_weight"]
    assert ["relu" in row.problem for row in first] == [True, False, False, False]
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
    assert all(row.state == "tuned" and row.timed == 3 for row in report)
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


# --- what is seen ----------------------------------------------------------------------------------------------------


class Calls(nn.Module):
    """A functional call beside a layer, under autocast, with an output size, without a batch, twice."""

    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 3, 4, 2, 1)
        self.weight = nn.Parameter(torch.randn(3, 2, 3, 3))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.up(x, output_size=[2 * size + 1 for size in x.shape[-2:]])
        y = y.float()
        return upfold.conv_transpose2d(y, self.weight, stride=[2, 1]) + upfold.conv_transpose2d(y, self.weight, None, (2, 1))


@pytest.mark.parametrize("batched", [True, False], ids=["batch", "no batch"])
def test_problems_are_those_that_run(clock, monkeypatch, batched):
    """Each problem that a replaced model then runs has its plan."""
    model, x = Calls().eval(), X if batched else X[0]
    report = upfold.tune(model, x)
    assert [row.layers for row in report] == [("up",), ("",)]
    assert "bfloat16" in report.rows[0].problem
    seen = []
    original = plans.lookup
    monkeypatch.setattr(plans, "lookup", lambda *arguments: seen.append(original(*arguments)) or seen[-1])
    upfold.replace(model)
    with torch.no_grad():
        model(x)
    assert len(seen) == 2
    assert all(seen)


def test_the_model_is_left_as_it_was(clock):
    model = nn.Sequential(layer(), nn.Dropout(), nn.BatchNorm2d(3)).train()
    mean = model[2].running_mean.clone()
    upfold.tune(model, X)
    assert model.training
    assert torch.equal(model[2].running_mean, mean)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_strided_inputs_are_made_anew_as_they_came():
    wide = torch.randn(2, 8, 12, 26)
    for x in (wide[:, 2:6, :, ::2], wide[:, :4, :, :13], X.contiguous(memory_format=torch.channels_last), X.double()):
        found = TUNE.subjects_of(layer().to(x.dtype), (x,), True)
        assert [subject.mode for subject in found] == ["forward", "grad_input", "grad_weight"]
        for subject in found:
            (made, g), other = subject.operands(2)
            read, shape = (g, subject.y) if subject.mode == "grad_input" else (made, x)
            assert (read.shape, read.stride(), read.dtype) == (shape.shape, shape.stride(), x.dtype)
            assert read.data_ptr() != (other[1] if subject.mode == "grad_input" else other[0]).data_ptr()
        made = found[0].operands(1)[0][0]
        again = execute.describe(made, found[0].w, found[0].bias, found[0].arguments)
        assert problem_key(again, CPU) == problem_key(found[0].problem, CPU)


@pytest.mark.parametrize("alignment", [4, 8, 16])
def test_inputs_are_made_anew_as_aligned_as_they_came(alignment):
    forward, to_input, to_weight = TUNE.subjects_of(layer(), (X,), True)
    for subject in (forward, to_input, to_weight):
        problem = dataclasses.replace(subject.problem, alignment=alignment)
        x, g = dataclasses.replace(subject, problem=problem).operands(1)[0]
        for read in (g,) if subject is to_input else (x,) if subject is forward else (x, g):
            assert read.data_ptr() % 16 == alignment % 16


# --- keys ------------------------------------------------------------------------------------------------------------


def test_buckets_are_quarters_of_an_octave():
    assert [bucket(size) for size in range(10)] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert [bucket(size) for size in (16, 17, 20, 21, 64, 65, 80, 1000, 1024, 1025)] == [
        16, 20, 20, 24, 64, 80, 80, 1024, 1024, 1280,
    ]  # fmt: skip
    for size in range(1, 5000):
        assert size <= bucket(size) <= 1.25 * size
        assert bucket(bucket(size)) == bucket(size)


def test_near_lengths_share_a_plan(clock):
    vocoder = upfold.ConvTranspose1d(8, 4, 16, 8, 4)
    lengths = range(880, 930)
    for length in lengths:
        upfold.tune(vocoder, torch.randn(1, 8, length))
    assert len(clock.heats) == len({bucket(length) for length in lengths}) == 2
    assert {runs(vocoder, torch.randn(1, 8, length)).algorithm for length in lengths} == {"gemm"}
    assert runs(vocoder, torch.randn(1, 8, 1030)).reason.startswith("least predicted time")


def test_everything_but_the_sizes_is_exact():
    base = problem()
    others = {
        "batch": problem(torch.randn(40, 4, 12, 13)),
        "size": problem(torch.randn(2, 4, 12, 40)),
        "channels": problem(torch.randn(2, 8, 12, 13), upfold.ConvTranspose2d(8, 3, 4, 2, 1)),
        "kernel": problem(module=upfold.ConvTranspose2d(4, 3, 3, 2, 1)),
        "output_padding": problem(module=upfold.ConvTranspose2d(4, 3, 4, 2, 1, 1)),
        "dilation": problem(module=upfold.ConvTranspose2d(4, 3, 4, 2, 1, dilation=2)),
        "bias": problem(module=upfold.ConvTranspose2d(4, 3, 4, 2, 1, bias=False)),
        "activation": problem(module=layer(activation=("leaky_relu", 0.1))),
        "slope": problem(module=layer(activation=("leaky_relu", 0.2))),
        "dtype": problem(X.double(), layer().double()),
        "layout": problem(X.contiguous(memory_format=torch.channels_last)),
        "gaps": problem(torch.randn(2, 8, 12, 13)[:, :4]),
    }
    keys = {name: problem_key(found, CPU) for name, found in others.items()}
    assert len({*keys.values(), problem_key(base, CPU)}) == len(others) + 1
    with upfold.use(workspace_mb=8):
        assert problem_key(problem(), CPU) != problem_key(base, CPU)
    for near in (torch.randn(2, 4, 11, 14), torch.randn(2, 4, 12, 13)):
        assert problem_key(problem(near), CPU) == problem_key(base, CPU)
    wider = problem(torch.randn(2, 8, 11, 14)[:, :4])
    assert problem_key(wider, CPU) == keys["gaps"]


def test_plans_belong_to_a_device_a_driver_and_a_version(folder):
    ranking = Ranking((Measured("gemm", 0, 1e-3),))
    machine = plans.machine_of(CPU)
    for other in (
        machine._replace(device="abacus"),
        machine._replace(driver="beads"),
        machine._replace(upfold="0.0.1"),
    ):
        plans.remember({other: {problem_key(problem(), CPU): ranking}})
        forget()
        assert runs(layer()).algorithm == "direct"
    plans.remember({machine: {problem_key(problem(), CPU): ranking}})
    forget()
    assert runs(layer()).algorithm == "gemm"
    assert len(json.loads((folder / "plans-1.json").read_text())["devices"]) == 4


@pytest.mark.parametrize(
    "measured",
    [("winograd", 0, 1e-3), ("gemm", 99, 1e-3), ("gemm_atomic", 0, 1e-3), ("depthwise", 0, 1e-3)],
    ids=["unknown", "no such config", "never chosen", "refuses"],
)
def test_a_plan_that_does_not_fit_is_passed_over(measured):
    remember(measured)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = runs(layer())
    assert (plan.algorithm, plan.reason.split(":")[0]) == ("direct", "least predicted time")
    remember(measured, ("gemm", 0, 2e-3))
    assert runs(layer()).algorithm == "gemm"


def test_a_plan_that_takes_too_much_scratch_is_passed_over(monkeypatch):
    remember(("gemm", 0, 1e-3))
    monkeypatch.setattr(REGISTRY["gemm"], "workspace_bytes", lambda problem, config, device: problem.workspace_cap + 1)
    assert runs(layer()).algorithm == "direct"


def test_an_algorithm_asked_for_by_name_overrides_a_plan(clock):
    upfold.tune(layer(), X)
    with upfold.use(algorithm="direct"):
        assert runs(layer()).reason == "asked for by name"
        assert runs(layer()).algorithm == "direct"
        with upfold.use(algorithm="auto"):
            assert runs(layer()).algorithm == "gemm"
    assert runs(layer(algorithm="direct")).algorithm == "direct"


def test_devices_that_are_not_there():
    """With plans at hand, a question about another device is answered as without."""
    remember(("gemm", 0, 1e-3))
    devices = ["mps"] if torch.cuda.is_available() else ["mps", "cuda", "cuda:3"]
    for device in devices:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert upfold.explain(problem(), device=device).plan.algorithm == "torch"


# --- switches --------------------------------------------------------------------------------------------------------


def test_plans_can_be_switched_off(clock, monkeypatch):
    monkeypatch.setenv("UPFOLD_TUNED", "0")
    report = upfold.tune(layer(), X)
    assert runs(layer()).algorithm == "direct"
    assert "not used: UPFOLD_TUNED is off" in str(report)
    forget()
    monkeypatch.setenv("UPFOLD_TUNED", "1")
    assert runs(layer()).algorithm == "gemm"


def test_where_the_file_is(monkeypatch, tmp_path):
    assert plans.cache_file() == tmp_path / "cache" / "plans-1.json"
    monkeypatch.delenv("UPFOLD_CACHE_DIR")
    platformdirs = pytest.importorskip("platformdirs")
    assert str(plans.cache_file().parent) == platformdirs.user_cache_dir("upfold", appauthor=False)
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert plans.cache_file() == tmp_path / "xdg" / "upfold" / "plans-1.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    if os.name != "nt":
        assert plans.cache_file() == tmp_path / ".cache" / "upfold" / "plans-1.json"


def test_without_a_file_nothing_is_made(folder):
    layer()(X)
    assert not folder.exists()


# --- the file --------------------------------------------------------------------------------------------------------

DAMAGED = {
    "empty": "",
    "cut off": '{"format": "upfold plans", "schema": 1, "dev',
    "binary": b"\xff\xfe\x00\x01",
    "a list": "[]",
    "foreign": '{"format": "somebody else\'s", "schema": 1, "devices": []}',
    "other schema": '{"format": "upfold plans", "schema": 2, "devices": []}',
    "nested": "[" * 100_000,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_set_aside_with_one_warning(clock, folder, content):
    folder.mkdir()
    file = folder / "plans-1.json"
    data = content if isinstance(content, bytes) else content.encode()
    file.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="set aside as plans-1.damaged-1.json") as caught:
        assert runs(layer()).algorithm == "direct"
    assert len(caught) == 1
    assert (folder / "plans-1.damaged-1.json").read_bytes() == data
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forget()
        runs(layer())
        upfold.tune(layer(), X)
    assert len(in_file(folder)) == 1
    file.write_bytes(data)  # it happens to a tune as well, and to a second file
    with pytest.warns(RuntimeWarning, match="set aside as plans-1.damaged-2.json") as caught:
        upfold.tune(layer(), X, again=True)
    assert len(caught) == 1
    assert len(in_file(folder)) == 1


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {"ranking": [], "complete": True, "torch": ""},
        {"ranking": [{"algorithm": "gemm", "config": "0", "seconds": 1}], "complete": True, "torch": ""},
        {"ranking": [{"algorithm": "gemm", "config": True, "seconds": 1}], "complete": True, "torch": ""},
        {"ranking": [{"algorithm": 3, "config": 0, "seconds": 1}], "complete": True, "torch": ""},
        {"ranking": [{"algorithm": "gemm", "config": 0, "seconds": float("nan")}], "complete": True, "torch": ""},
        {"ranking": [{"algorithm": "gemm", "config": 0}], "complete": True, "torch": ""},
        {"ranking": "gemm"},
    ],
)
def test_single_entries_without_sense_are_passed_over(folder, entry):
    good = {"ranking": [{"algorithm": "gemm", "config": 0, "seconds": 1e-3}], "complete": True, "torch": ""}
    machine = plans.machine_of(CPU)._asdict()
    small = torch.randn(1, 4, 3, 3)
    found = {problem_key(problem(), CPU): entry, problem_key(problem(small), CPU): good}
    devices = [{**machine, "plans": found}, {**machine, "plans": 3}, {"device": 1}, "nothing"]
    folder.mkdir()
    (folder / "plans-1.json").write_text(json.dumps({"format": "upfold plans", "schema": 1, "devices": devices}))
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runs(layer()).algorithm == "direct"
        assert runs(layer(), small).algorithm == "gemm"


def unwritable(tmp_path, monkeypatch):
    """A folder that cannot be made, for any user: its parent is a file."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UPFOLD_CACHE_DIR", str(tmp_path / "file" / "cache"))


def test_a_folder_that_cannot_be_written(clock, tmp_path, monkeypatch):
    unwritable(tmp_path, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runs(layer()).algorithm == "direct"
    with pytest.warns(RuntimeWarning, match="plans stay in this process") as caught:
        report = upfold.tune(layer(), X)
    assert len(caught) == 1
    assert report.file is None
    assert "the plans stay in this process" in str(report)
    assert runs(layer()).algorithm == "gemm"


@pytest.mark.skipif(os.name == "nt" or not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder(clock, folder):
    remember(("gemm", 0, 1e-3))
    folder.chmod(0o500)
    try:
        assert runs(layer()).algorithm == "gemm"
        with pytest.warns(RuntimeWarning, match="plans stay in this process"):
            upfold.tune(layer(), torch.randn(1, 4, 3, 3))
        (folder / "plans-1.json").exists()
    finally:
        folder.chmod(0o700)


def test_a_file_that_cannot_be_read(folder):
    (folder / "plans-1.json").mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="tuned plans are not used: .* cannot be read") as caught:
        assert runs(layer()).algorithm == "direct"
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runs(layer(), torch.randn(1, 4, 3, 3)).algorithm == "direct"


def test_without_filelock_plans_stay_in_the_process(clock, monkeypatch):
    monkeypatch.setitem(sys.modules, "filelock", None)
    with pytest.warns(RuntimeWarning, match=r"filelock is not installed; pip install 'upfold\[cli\]'"):
        upfold.tune(layer(), X)
    assert runs(layer()).algorithm == "gemm"


def test_a_failed_write_leaves_the_old_file(folder, monkeypatch):
    remember(("gemm", 0, 1e-3))
    before = (folder / "plans-1.json").read_bytes()

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        plans.remember({plans.machine_of(CPU): {"another": Ranking((Measured("direct", 0, 1.0),))}})
    assert (folder / "plans-1.json").read_bytes() == before
    assert {file.name for file in folder.iterdir()} <= {"plans-1.json", "plans-1.json.lock"}


WRITER = """
import sys
from upfold import plans
from upfold.plans import Machine, Measured, Ranking
name = sys.argv[1]
print("ready", flush=True)
sys.stdin.readline()
for number in range(20):
    plans.remember({Machine("abacus", "beads", "1"): {f"{name} {number}": Ranking((Measured("gemm", 0, 1.0),))}})
"""


def test_processes_at_once_lose_nothing(folder):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in ("one", "two")
    ]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    threads = [
        threading.Thread(
            target=plans.remember, args=({plans.Machine("abacus", "beads", "1"): {key: Ranking((Measured("direct", 0, 1.0),))}},)
        )
        for key in ("a thread", "another thread")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [writer.communicate(timeout=100) and writer.returncode for writer in writers] == [0, 0]
    assert set(in_file(folder)) == {f"{name} {n}" for name in ("one", "two") for n in range(20)} | {"a thread", "another thread"}


# --- export and import -----------------------------------------------------------------------------------------------


def test_plans_are_shipped_with_a_model(clock, tmp_path, monkeypatch):
    upfold.tune(layer(), X)
    shipped = tmp_path / "model" / "plans.json"
    assert upfold.save_plans(shipped) == 1
    monkeypatch.setenv("UPFOLD_CACHE_DIR", str(tmp_path / "the user's"))
    forget()
    assert runs(layer()).algorithm == "direct"
    assert upfold.load_plans(shipped) == 1
    assert runs(layer()).algorithm == "gemm"
    assert not (tmp_path / "the user's").exists()
    forget()
    assert upfold.load_plans(str(shipped), keep=True) == 1
    forget()
    assert runs(layer()).algorithm == "gemm"
    again = tmp_path / "again.json"
    assert upfold.save_plans(again) == 1
    assert again.read_text() == shipped.read_text()


def test_loaded_plans_take_the_place_of_the_users(tmp_path):
    remember(("gemm", 0, 1e-3))
    upfold.save_plans(tmp_path / "gemm.json")
    remember(("torch", 0, 1e-3))
    assert runs(layer()).algorithm == "torch"
    upfold.load_plans(tmp_path / "gemm.json")
    assert runs(layer()).algorithm == "gemm"


def test_plans_of_other_machines_are_read_and_not_used(tmp_path):
    other = plans.machine_of(CPU)._replace(device="abacus")
    plans.write(tmp_path / "theirs.json", {other: {problem_key(problem(), CPU): Ranking((Measured("gemm", 0, 1e-3),))}})
    assert upfold.load_plans(tmp_path / "theirs.json") == 0
    assert runs(layer()).algorithm == "direct"


def test_a_file_that_is_named_must_be_good(tmp_path):
    with pytest.raises(FileNotFoundError):
        upfold.load_plans(tmp_path / "nothing.json")
    (tmp_path / "foreign.json").write_text("{}")
    with pytest.raises(InvalidArgument, match=r"foreign.json'; it holds no plans of upfold; upfold.save_plans writes such files"):
        upfold.load_plans(tmp_path / "foreign.json")
    assert (tmp_path / "foreign.json").exists()


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


def test_figures_do_not_hang_on_tuned_plans():
    """A bench tells what upfold predicts: no plan of this machine's, and no torch, is among its figures."""
    from upfold import cases
    from upfold.compare import Conditions, compare_case

    case = cases.find("k4s2p1")
    x, w, b = case.tensors()
    found = execute.describe(x, w, b, (case.geometry.stride, case.geometry.padding, 0, 1, 1))
    remember(("torch", 0, 1e-3), of=found)
    assert dispatch.plan(found, CPU).algorithm == "torch"
    assert compare_case(case, Conditions(seconds=0.001)).auto != "torch"
