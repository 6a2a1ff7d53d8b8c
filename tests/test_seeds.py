"""examples/seeds.py: each task's two models agree on the same weights, at a small size."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

import upfold
from programs import FOLDER, load

seeds = load("seeds")


# Between padding and bias each task orders its arguments in its own way.
SIGNATURES = {
    "GroupedDilated": "dilation groups",
    "AsymmetricKernel": "output_padding dilation groups",
    "SquareKernel": "output_padding groups",
    "WideKernel": "output_padding groups",
    "WideImage": "output_padding groups dilation",
}


@pytest.mark.parametrize("task", seeds.TASKS, ids=lambda task: task.__name__)
def test_models_agree(task):
    found = seeds.run(task, max_gflop=0.01, seconds=0.002)
    assert found.torch_shape == found.upfold_shape
    assert found.upfold_error <= found.error_bound
    assert found.torch_seconds > 0
    assert found.upfold_seconds > 0


@pytest.mark.parametrize("task", seeds.TASKS, ids=lambda task: task.__name__)
def test_each_has_its_tasks_signature(task):
    for kind in (task.Model, task.ModelNew):
        parameters = inspect.signature(kind).parameters
        assert " ".join(parameters) == f"in_channels out_channels kernel_size stride padding {SIGNATURES[task.__name__]} bias"
        assert parameters["bias"].default is False
    model, model_new = task.Model(*task.arguments), task.ModelNew(*task.arguments)
    assert type(model.conv_transpose2d) is torch.nn.ConvTranspose2d
    assert type(model_new.conv_transpose2d) is upfold.ConvTranspose2d
    assert model.conv_transpose2d.bias is None
    case = upfold.cases.find(task.case)
    layer = model.conv_transpose2d
    assert (layer.in_channels, layer.out_channels, layer.kernel_size) == (
        case.in_channels,
        case.out_channels,
        case.kernel_size,
    )
    assert (layer.stride, layer.padding, layer.dilation, layer.groups) == (
        case.stride,
        case.padding,
        case.dilation,
        case.groups,
    )


def test_full_shapes():
    shapes = {task.case: upfold.cases.find(task.case).out_size for task in seeds.TASKS}
    assert shapes["seed0-grouped-dilated"] == (257, 766)
    assert len(shapes) == 5


def test_program_prints_each_task():
    done = subprocess.run(
        [sys.executable, str(FOLDER / "seeds.py"), "--max-gflop", "0.005", "--seconds", "0.002"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("shapes equal") == 5
    assert "DIFFERENT" not in done.stdout
