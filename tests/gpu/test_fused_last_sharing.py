"""Tiles whose weights the two blocks of a cluster share, each with positions of its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from every_config import forward_is_exact

from gpu import missing
from oracle import describe, geometry_arguments
from upfold import cases
from upfold.algorithms import REGISTRY, cuda, fused_alternating, fused_columns, fused_last

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


# Too few for each multiprocessor; and parts of the positions that are odd in number for every tile, so that the last would be
# alone.
FEW, ODD = (dataclasses.replace(LAYERS["equal"], in_size=size, batch=batch) for size, batch in (((32, 4), 1), ((8, 8), 101)))


def _work(problem, config, device):
    return fused_alternating.Work(*fused_last.call(problem, config, cuda.index(device)).work)


def _sharing(problem, device):
    configs = [c for c in REGISTRY["fused"].configs(problem, device) if fused_last.FIRST <= c < fused_columns.FIRST]
    found = [config for config in configs if _work(problem, config, device).sharers == 2]
    assert found, "no tile of this layer shares weights"
    return found


@TYPES
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", LAYERS)
def test_forward_is_exact(name, storage, dtype, device):
    forward_is_exact(LAYERS[name], dtype, device, STORAGES[storage], _sharing)


@TYPES
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("case", [FEW, ODD], ids=["few", "odd"])
def test_few_tiles_and_those_without_a_partner_share_nothing(case, storage, dtype, device):
    x, w, b = LAYERS["equal"].tensors(dtype, device)
    sharing = _sharing(describe(STORAGES[storage](x), w, b, tuple(geometry_arguments(case.geometry).values())), device)

    def alone(problem, device):
        works = [_work(problem, config, device) for config in sharing]
        assert all(work.sharers == 1 and not work.resident for work in works)
        assert all((work.tiles >= 3 * 132) == (case is ODD) for work in works)
        return sharing

    forward_is_exact(case, dtype, device, STORAGES[storage], alone)
