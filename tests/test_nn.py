"""The layers against torch's: constructor, initialisation, state_dict, forward with output_size, and what they print."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import upfold
from oracle import GENERAL_ALGORITHMS
from upfold import InvalidArgument

LAYERS = {
    1: (upfold.ConvTranspose1d, nn.ConvTranspose1d, (2, 6, 7)),
    2: (upfold.ConvTranspose2d, nn.ConvTranspose2d, (2, 6, 7, 5)),
    3: (upfold.ConvTranspose3d, nn.ConvTranspose3d, (2, 6, 3, 4, 5)),
}
NDIMS = pytest.mark.parametrize("ndim", LAYERS)
# Positional and keyword arguments after (in_channels, out_channels).
ARGUMENTS = {
    "kernel": ((3,), {}),
    "positional": ((4, 2, 1), {}),
    "everything": ((3, 2, 1, 1, 3, False, 1), {}),
    "keywords": ((), {"kernel_size": 3, "stride": 3, "padding": 2, "output_padding": 2, "groups": 3, "dilation": 2}),
    "no bias": ((2,), {"stride": 2, "bias": False}),
    "double": ((2,), {"stride": 2, "dtype": torch.float64}),
    "zeros": ((2,), {"padding_mode": "zeros", "device": "cpu"}),
}


def pair(ndim, positional=(3,), keywords=None):
    """Our layer and torch's, made alike under the same seed."""
    ours, torchs, _ = LAYERS[ndim]
    made = []
    for kind in (ours, torchs):
        torch.manual_seed(11)
        made.append(kind(6, 9, *positional, **(keywords or {})))
    return made


@NDIMS
@pytest.mark.parametrize("positional, keywords", ARGUMENTS.values(), ids=list(ARGUMENTS))
def test_same_layer(ndim, positional, keywords):
    mine, theirs = pair(ndim, positional, keywords)
    assert isinstance(mine, LAYERS[ndim][1])
    assert repr(mine) == repr(theirs)
    assert list(mine.state_dict()) == list(theirs.state_dict())
    for one, other in zip(mine.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    x = torch.randn(LAYERS[ndim][2], dtype=mine.weight.dtype)
    torch.testing.assert_close(mine(x), theirs(x))
    torch.testing.assert_close(mine(x[0]), theirs(x[0]))


@NDIMS
def test_signature_is_torchs_and_three_keywords(ndim):
    mine, theirs = (inspect.signature(kind.__init__).parameters for kind in LAYERS[ndim][:2])
    assert list(mine)[: len(theirs)] == list(theirs)
    added = set(mine) - set(theirs)
    assert added == {"algorithm", "activation", "crop"}
    assert all(mine[name].kind is inspect.Parameter.KEYWORD_ONLY for name in added)


@NDIMS
def test_state_dict_loads_both_ways(ndim):
    mine, theirs = pair(ndim)
    other = LAYERS[ndim][0](6, 9, 3)
    other.load_state_dict(theirs.state_dict(), strict=True)
    assert torch.equal(other.weight, mine.weight)
    LAYERS[ndim][1](6, 9, 3).load_state_dict(mine.state_dict(), strict=True)


@NDIMS
def test_output_size(ndim):
    mine, theirs = pair(ndim, (3,), {"stride": 3, "padding": 1})
    x = torch.randn(LAYERS[ndim][2])
    smallest = theirs(x).shape[2:]
    for extra in range(3):
        size = [value + extra for value in smallest]
        for asked in (size, [2, 9, *size]):
            got, want = mine(x, asked), theirs(x, output_size=asked)
            assert got.shape == want.shape
            torch.testing.assert_close(got, want)
    for out_of_reach in ([value + 3 for value in smallest], [value - 1 for value in smallest], [4] * (ndim + 5)):
        with pytest.raises(InvalidArgument, match="output_size") as caught:
            mine(x, output_size=out_of_reach)
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, RuntimeError)
        with pytest.raises(ValueError):  # noqa: PT011  torch's own words are its business
            theirs(x, output_size=out_of_reach)


BAD_CONSTRUCTIONS = {
    "stride": ({"stride": 0}, "stride = "),
    "dilation": ({"dilation": -1}, "dilation = "),
    "kernel": ({"kernel_size": 0}, "kernel_size = "),
    "padding": ({"padding": -1}, "padding = "),
    "output padding": ({"output_padding": 2, "stride": 2}, "output_padding = "),
    "groups of input": ({"groups": 4}, "groups = "),
    "no groups": ({"groups": 0}, "groups = "),
    "algorithm": ({"algorithm": "magic"}, "algorithm = 'magic'"),
    "activation": ({"activation": "softmax"}, "activation = 'softmax'"),
}


@NDIMS
@pytest.mark.parametrize("keywords, text", BAD_CONSTRUCTIONS.values(), ids=list(BAD_CONSTRUCTIONS))
def test_bad_construction(ndim, keywords, text):
    with pytest.raises(InvalidArgument, match=text):
        LAYERS[ndim][0](6, 12, **({"kernel_size": 3} | keywords))


@NDIMS
def test_padding_mode(ndim):
    for kind in LAYERS[ndim][:2]:
        with pytest.raises(ValueError, match="zeros"):
            kind(6, 9, 3, padding_mode="reflect")


@NDIMS
def test_algorithm_and_activation(ndim):
    kind, torchs, shape = LAYERS[ndim]
    x = torch.randn(shape)
    torch.manual_seed(1)
    want = torch.relu(torchs(6, 9, 3, 2)(x))
    for algorithm in (None, "auto", *GENERAL_ALGORITHMS, "torch"):
        torch.manual_seed(1)
        layer = kind(6, 9, 3, 2, algorithm=algorithm, activation="relu")
        assert "relu" in repr(layer)
        with torch.no_grad():
            torch.testing.assert_close(layer(x), want)
        torch.testing.assert_close(layer(x), want)


def test_activation_as_a_list():
    """As a configuration file has it."""
    layer = upfold.ConvTranspose2d(6, 9, 3, 2, activation=["leaky_relu", 0.5])
    x = torch.randn(2, 6, 7, 5)
    want = upfold.conv_transpose2d(x, layer.weight, layer.bias, 2, activation=("leaky_relu", 0.5))
    torch.testing.assert_close(layer(x), want)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), want)


@NDIMS
def test_copies(ndim):
    layer = LAYERS[ndim][0](6, 9, 3, 2, activation=("leaky_relu", 0.1), algorithm="direct")
    x = torch.randn(LAYERS[ndim][2])
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.copy(layer)):
        assert repr(copied) == repr(layer)
        assert torch.equal(copied(x), layer(x))


def test_training_reaches_the_same_weights():
    """Ten steps of the same decoder on the same data, with our layers and with torch's."""

    def train(first, second):
        torch.manual_seed(5)
        model = nn.Sequential(first(4, 6, 4, 2, 1, dtype=torch.float64), nn.ReLU(), second(6, 3, 3, 2, 1, 1, dtype=torch.float64))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        x, target = torch.randn(2, 4, 5, 6, dtype=torch.float64), torch.randn(2, 3, 20, 24, dtype=torch.float64)
        for _ in range(10):
            optimizer.zero_grad()
            (model(x) - target).square().mean().backward()
            optimizer.step()
        return torch.nn.utils.parameters_to_vector(model.parameters())

    ours = train(upfold.ConvTranspose2d, upfold.ConvTranspose2d)
    torch.testing.assert_close(ours, train(nn.ConvTranspose2d, nn.ConvTranspose2d))


def test_dtype_moves():
    layer = upfold.ConvTranspose2d(4, 3, 2, 2)
    x = torch.randn(1, 4, 5, 5)
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.complex64):
        moved = copy.deepcopy(layer).to(dtype)
        y = moved(x.to(dtype))
        assert y.dtype == dtype
        torch.testing.assert_close(y.to(torch.complex64), layer(x).to(torch.complex64), rtol=2e-2, atol=2e-2)
