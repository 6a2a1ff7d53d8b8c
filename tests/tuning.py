"""What the tests of tuning share: a cache folder of their own, a clock that is told what to read, and one small layer."""

from __future__ import annotations

import json
import sys

import torch

import upfold
from upfold import dispatch, execute, plans
from upfold.plans import Measured, Ranking, problem_key

CPU = torch.device("cpu")
# `upfold.tune` is the function; its module is found by name alone.
TUNE = sys.modules["upfold.tune"]


def own_folder(tmp_path, monkeypatch):
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


def told_clock(monkeypatch):
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
