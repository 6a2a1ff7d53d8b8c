"""What may follow a transposed convolution in a graph: activations, crops, and what does nothing in evaluation mode."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.padding import _ConstantPadNd

Pairs = tuple[tuple[int, int], ...]
CONCATENATIONS = frozenset(getattr(torch, name) for name in ("cat", "concat", "concatenate") if hasattr(torch, name))
_FUNCTIONS: dict[Any, str] = {
    F.relu: "relu",
    F.relu_: "relu",
    torch.relu: "relu",
    torch.relu_: "relu",
    F.silu: "silu",
    F.tanh: "tanh",
    torch.tanh: "tanh",
    torch.tanh_: "tanh",
    F.sigmoid: "sigmoid",
    torch.sigmoid: "sigmoid",
    torch.sigmoid_: "sigmoid",
}
_METHODS = {name + end: name for name in ("relu", "tanh", "sigmoid") for end in ("", "_")}
_MODULES: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)


class Refused(Exception):
    """Why something was not taken in."""


def does_nothing(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether the node gives its input back in evaluation mode."""
    if module is not None:
        return isinstance(module, _DropoutNd) or type(module) is nn.Identity
    if node.op != "call_function" or node.target not in _DROPOUTS:
        return False
    training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", node.target is not F.alpha_dropout)
    return training is False


def activation_of(node: fx.Node, module: nn.Module | None) -> Any:
    """The `activation=` that does what the node does, or None."""
    if module is not None:
        return _activation_of_module(module)
    if node.op == "call_method":
        return _METHODS.get(str(node.target)) if len(node.args) == 1 and not node.kwargs else None
    if node.op != "call_function":
        return None
    if node.target in _FUNCTIONS:
        return _FUNCTIONS[node.target]
    if node.target in (F.leaky_relu, F.leaky_relu_):
        slope = node.args[1] if len(node.args) > 1 else node.kwargs.get("negative_slope", 0.01)
        return ("leaky_relu", float(slope)) if isinstance(slope, (int, float)) else None
    if node.target is F.gelu:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(str(node.kwargs.get("approximate", "none")))
    return None


def _activation_of_module(module: nn.Module) -> Any:
    if type(module) is nn.LeakyReLU:
        return "leaky_relu", float(module.negative_slope)
    if type(module) is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(module.approximate)
    if type(module) is nn.PReLU and module.num_parameters == 1:
        return "leaky_relu", float(module.weight.detach())
    return _MODULES.get(type(module))


def norm_text(norm: nn.Module) -> str:
    """Why a norm that is no plain batch norm is not folded."""
    if "Instance" in type(norm).__name__:
        return "its statistics are those of each input"
    return "upfold does not know what this class changes in a batch norm"


@dataclass
class Cut:
    """A node that leaves out the ends of a tensor, and the nodes that only compute where."""

    node: fx.Node
    pairs: Pairs
    helpers: list[fx.Node]
    batched_only: bool


def crop_of(source: fx.Node, ndim: int) -> Cut | None:
    """The one use of `source` that cuts off its ends, or None where it is used otherwise.

    Raises:
        Refused: it is cut, but in a way that a crop cannot say.
    """
    slices = [user for user in source.users if user.op == "call_function" and user.target is operator.getitem]
    if len(slices) == 1:
        return _crop_of_slice(source, slices[0], ndim)
    users = list(source.users)
    if len(users) != 1 or users[0].op not in ("call_function", "call_module"):
        return None
    amounts = _padding_of(users[0])
    if amounts is None:
        return None
    if users[0].all_input_nodes != [source] or not all(isinstance(amount, int) for amount in amounts):
        raise Refused("the amounts of padding behind it are computed")
    if len(amounts) % 2 or len(amounts) > 2 * ndim:
        raise Refused("padding of other axes than the spatial ones follows")
    if any(amount > 0 for amount in amounts):
        raise Refused("padding that enlarges its result follows")
    pairs = [(-amounts[i], -amounts[i + 1]) for i in range(0, len(amounts), 2)]
    pairs += [(0, 0)] * (ndim - len(pairs))
    return Cut(users[0], tuple(reversed(pairs)), [], False)


def _padding_of(node: fx.Node) -> Any:
    """The amounts that a padding node adds, last axis first, or None for any other node."""
    if node.op == "call_module":
        module = node.graph.owning_module.get_submodule(str(node.target))  # type: ignore[union-attr]
        return tuple(module.padding) if isinstance(module, _ConstantPadNd) and not module._forward_hooks else None
    if node.target is not F.pad:
        return None
    amounts = node.args[1] if len(node.args) > 1 else node.kwargs.get("pad")
    return tuple(amounts) if isinstance(amounts, (tuple, list)) else ()


def _crop_of_slice(source: fx.Node, cut: fx.Node, ndim: int) -> Cut | None:
    index = cut.args[1] if isinstance(cut.args[1], (tuple, list)) else (cut.args[1],)
    if cut.args[0] is not source or not any(isinstance(entry, slice) for entry in index):
        return None  # one pixel or channel is picked, or a mask is applied
    entries, batched_only = _by_axis(list(index), ndim)
    helpers: list[fx.Node] = []
    pairs = []
    for axis, entry in enumerate(entries):
        if not isinstance(entry, slice) or entry.step not in (None, 1):
            raise Refused("a slice that picks or skips follows")
        pairs.append((_begin(entry.start), _end(entry.stop, source, axis, ndim, helpers)))
    if any(pair != (0, 0) for pair in pairs[:-ndim]):
        raise Refused("a slice of the channels or of the batch follows")
    allowed = {cut, *helpers}
    batched_only = batched_only or any(one.target is operator.getitem and one.args[1] >= 0 for one in helpers)  # type: ignore
    others = [user for user in source.users if user not in allowed]
    if others or any(user not in allowed for helper in helpers for user in helper.users):
        raise Refused("its result, or its size, is used in other places than the slice that follows")
    return Cut(cut, tuple(pairs[-ndim:]), sorted(set(helpers), key=list(source.graph.nodes).index), batched_only)


def _by_axis(index: list[Any], ndim: int) -> tuple[list[Any], bool]:
    """An index with an entry for each axis of a batched tensor, and whether it would mean others without a batch."""
    dims = ndim + 2
    if any(entry is None for entry in index) or len(index) - (Ellipsis in index) > dims:
        raise Refused("a slice that adds axes follows")
    if Ellipsis not in index:
        return index + [slice(None)] * (dims - len(index)), True
    place = index.index(Ellipsis)
    missing = dims + 1 - len(index)
    return index[:place] + [slice(None)] * missing + index[place + 1 :], place > 0


def _begin(start: Any) -> int:
    if start is None or (isinstance(start, int) and start >= 0):
        return start or 0
    raise Refused("a slice follows whose begin depends on the size")


def _end(stop: Any, source: fx.Node, axis: int, ndim: int, helpers: list[fx.Node]) -> int:
    """How many elements a slice leaves out at the end: ``[:-2]``, or ``[: y.shape[-1] - 2]``."""
    if stop is None:
        return 0
    if isinstance(stop, int):
        if stop < 0:
            return -stop
        raise Refused("a slice to a fixed position follows, so that what it leaves out depends on the size")
    amount: Any = 0
    if isinstance(stop, fx.Node) and stop.target is operator.sub:
        helpers.append(stop)
        stop, amount = stop.args
    if isinstance(amount, int) and amount >= 0 and _is_size(stop, source, (axis, axis - ndim - 2), helpers):
        return amount
    raise Refused("a slice follows whose end is computed from something else than its own size")


def _is_size(node: Any, source: fx.Node, axes: tuple[int, int], helpers: list[fx.Node]) -> bool:
    """Whether the node is the size of `source` on an axis; collects what computes it. Axes count from either end."""
    if not isinstance(node, fx.Node):
        return False
    helpers.append(node)
    if node.op == "call_method" and node.target == "size":
        return node.args[0] is source and len(node.args) == 2 and node.args[1] in axes
    if node.op != "call_function" or node.target is not operator.getitem or node.args[1] not in axes:
        return False
    shape = node.args[0]
    if not isinstance(shape, fx.Node):
        return False
    helpers.append(shape)
    by_attribute = shape.op == "call_function" and shape.target is getattr and shape.args == (source, "shape")
    return by_attribute or (shape.op == "call_method" and shape.target == "size" and shape.args == (source,))


def follows_alone(module: nn.Module) -> bool:
    """Whether a module is of a kind that may be taken into the layer before it."""
    kinds = (*_MODULES, nn.LeakyReLU, nn.GELU, nn.PReLU, nn.Identity)
    return type(module) in kinds or isinstance(module, (_NormBase, _DropoutNd, _ConstantPadNd))
