"""The tuned plans: by what they are found again, what switches them off, and what becomes of a file that others touch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch

import upfold
from tuning import CPU, X, forget, in_file, layer, own_folder, problem, remember, runs, told_clock
from upfold import InvalidArgument, cases, dispatch, execute, plans
from upfold.algorithms import REGISTRY
from upfold.compare import Conditions, compare_case
from upfold.plans import Measured, Ranking, bucket, problem_key

folder = pytest.fixture(autouse=True)(own_folder)
clock = pytest.fixture(told_clock)


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
    assert "not used: UPFOLD_TUNED" in str(report)
    with upfold.use(tuned=True):
        assert runs(layer()).algorithm == "gemm"
    monkeypatch.setenv("UPFOLD_TUNED", "1")
    assert runs(layer()).algorithm == "gemm"
    with upfold.use(tuned=False):
        assert runs(layer()).algorithm == "direct"


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


def test_figures_do_not_hang_on_tuned_plans():
    """A bench tells what upfold predicts: no plan of this machine's, and no torch, is among its figures."""
    case = cases.find("k4s2p1")
    x, w, b = case.tensors()
    found = execute.describe(x, w, b, (case.geometry.stride, case.geometry.padding, 0, 1, 1))
    remember(("torch", 0, 1e-3), of=found)
    assert dispatch.plan(found, CPU).algorithm == "torch"
    assert compare_case(case, Conditions(seconds=0.001)).auto != "torch"


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
