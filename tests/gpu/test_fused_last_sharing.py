"""Tiles whose weights the two blocks of a cluster share, each with positions of its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from every_config import forward_is_exact

from gpu import missing
from oracle import describe, geometry_arguments
from upfold import cases
from upfold.algorithms import REGISTRY, cuda, fused_columns, fused_last

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)
if torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("clusters of blocks, on compute capability 9.0 alone", allow_module_level=True)

pytestmark = pytest.mark.gpu
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype).removeprefix("torch."))
STORAGES = {
    "contiguous": torch.Tensor.contiguous,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d),
}
# Of more weights than stay in shared memory, and of several tiles for each multiprocessor. That they repeat under load,
# test_repeats_under_load.py tests with all other tiles.
LAYERS = {
    "equal": dataclasses.replace(cases.find("unet-1024-512@32"), in_channels=512, out_channels=256, batch=8),
    "3d": dataclasses.replace(cases.find("nnunet3d-64-32@64"), in_channels=512, out_channels=128, in_size=(16, 16, 16), batch=2),
}


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def _configs(problem, device):
    return [config for config in REGISTRY["fused"].configs(problem, device) if fused_last.FIRST <= config < fused_columns.FIRST]


def _sharers(problem, config, device):
    return fused_last.call(problem, config, cuda.index(device)).work[8]


def _sharing(problem, device):
    found = [config for config in _configs(problem, device) if _sharers(problem, config, device) == 2]
    assert found, "no tile of this layer shares weights"
    return found


def _problem(case, dtype, device):
    x, w, b = case.tensors(dtype, device, exact=True, bias=True)
    return describe(x, w, b, tuple(geometry_arguments(case.geometry).values()))


@TYPES
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", LAYERS)
def test_forward_is_exact(name, storage, dtype, device):
    forward_is_exact(LAYERS[name], dtype, device, STORAGES[storage], _sharing)


@TYPES
@pytest.mark.parametrize("batch", [1, 7])
def test_few_tiles_and_those_without_a_partner_share_nothing(batch, dtype, device):
    """Too few for each multiprocessor; and an odd number of parts of the positions, of which the last would be alone."""
    case = dataclasses.replace(LAYERS["equal"], in_size=(32, 4) if batch == 1 else (24, 24), batch=batch)
    alone = _configs(_problem(case, dtype, device), device)
    assert 1 in {_sharers(_problem(case, dtype, device), config, device) for config in alone}
    forward_is_exact(case, dtype, device, STORAGES["contiguous"], lambda problem, device: alone)
