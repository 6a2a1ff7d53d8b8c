"""What can be taken into the transposed convolutions of a graph: matching, and rewriting the graph.

From each layer the graph is followed while the result has one use. Batch norms in evaluation mode become part of the weights, the
first activation becomes the epilogue, slices and negative padding become a crop; a dropout, which does nothing then, is left out.
Where the end of such a chain only feeds a concatenation of channels, the layer writes into that; a ReLU of the concatenation is
taken into its parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.utils.parametrize import is_parametrized

from . import twins
from .followers import CONCATENATIONS, Refused, activation_of, crop_of, does_nothing, norm_text
from .nn import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from .recording import has_hooks
from .replace import refusal

_OURS = (ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)
_CONCATENATION = "concatenation"  # in what was taken
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass
class Chain:
    """What was taken into one layer of a graph.

    Attributes:
        name: the layer's path in the module that was traced.
        node: its call.
        end: the node that gives what the fused layer gives.
        taken: what was taken in, as text.
        reason: why the next use was not, or None where nothing is left.
        modules: those whose calls the fused layer stands for.
        read: modules of which it holds parameters and buffers as they were.
        layer: what runs in place of the layer, once the graph is rewritten.
    """

    name: str
    node: fx.Node
    end: fx.Node
    taken: list[str] = field(default_factory=list)
    reason: str | None = None
    modules: list[nn.Module] = field(default_factory=list)
    read: list[nn.Module] = field(default_factory=list)
    layer: Any = None
    absorbed: list[fx.Node] = field(default_factory=list)
    batched_only: bool = False


def fuse_graph(root: fx.GraphModule, modules: dict[str, nn.Module]) -> list[Chain]:
    """Rewrite the graph of `root` in place.

    Args:
        root: the graph and what it calls.
        modules: by the names that the graph has for them.

    Returns:
        One entry for each transposed convolution that the graph calls.
    """
    nodes = [node for node in root.graph.nodes if isinstance(modules.get(_target(node)), _ConvTransposeNd)]
    calls = [_target(node) for node in nodes]
    chains = []
    for node in nodes:
        chain = Chain(_target(node), node, node, modules=[modules[_target(node)]])
        if calls.count(chain.name) > 1:
            chain.reason = f"the layer is called {calls.count(chain.name)} times"
        else:
            _follow(chain, modules)
        chains.append(chain)
    for chain in chains:
        _rewrite(root, chain)
    _concatenate(root, chains, modules)
    for chain in chains:
        if chain.taken and _CONCATENATION not in chain.taken:
            _call(root, chain)
    root.delete_all_unused_submodules()
    root.graph.lint()
    root.recompile()
    return chains


def _target(node: fx.Node) -> str:
    return node.target if node.op == "call_module" and isinstance(node.target, str) else ""


def _follow(chain: Chain, modules: dict[str, nn.Module]) -> None:
    """Take in what follows, as far as it goes."""
    layer: Any = chain.modules[0]
    if not isinstance(layer, _OURS):
        chain.reason = refusal(layer) or "the layer is not upfold's"
        return
    if has_hooks(layer):
        chain.reason = "hooks are registered on the layer; they would see another result"
        return
    chain.layer = twins.twin_of(layer)
    ndim = len(layer.kernel_size)
    while True:
        try:
            crop = crop_of(chain.end, ndim)
            if crop is not None:
                twins.add_crop(chain.layer, crop.pairs)
                chain.batched_only = chain.batched_only or crop.batched_only
                chain.absorbed += [*crop.helpers, crop.node]
                chain.taken.append(f"crop {crop.pairs}")
                chain.end = crop.node
                continue
            users = list(chain.end.users)
            if len(users) != 1:
                raise Refused(f"its result is used in {len(users)} places" if users else "nothing uses its result")
            if users[0].target in CONCATENATIONS or users[0].op == "output":
                return
            _take(chain, users[0], modules)
        except Refused as refused:
            chain.reason = str(refused)
            return


def _take(chain: Chain, user: fx.Node, modules: dict[str, nn.Module]) -> None:
    """Take in one use of the chain's result, or raise the reason."""
    module = modules.get(_target(user))
    what = f"{type(module).__name__} {_target(user)}" if module is not None else _function_text(user)
    if not _reads_only(user, chain.end):
        raise Refused(f"{what} reads something else too")
    if module is not None and has_hooks(module):
        raise Refused(f"hooks are registered on {what}; nothing would call them")
    if module is not None and module.training:
        raise Refused(f"{what} is in training mode")
    if does_nothing(user, module):
        pass
    elif isinstance(module, _NormBase):
        _check_norm(chain, module, what)
        if not twins.fold_batch_norm(chain.layer, module):
            raise Refused(f"{what} would move the weights out of the range of {chain.layer.weight.dtype}")
        chain.read += [module, *([] if chain.modules[0] in chain.read else [chain.modules[0]])]
        chain.batched_only = chain.batched_only or isinstance(module, nn.BatchNorm1d)
        chain.taken.append(what)
    else:
        activation = activation_of(user, module)
        if activation is None:
            raise Refused(f"{what} follows")
        if chain.layer.activation is not None:
            raise Refused(f"{what} follows another activation")
        if chain.modules[0].weight.dtype.is_complex:
            raise Refused(f"{what} of complex numbers is nothing that upfold computes")
        chain.layer.activation = activation
        chain.read += [module] if isinstance(module, nn.PReLU) else []
        chain.taken.append(what)
    chain.modules += [] if module is None else [module]
    chain.absorbed.append(user)
    chain.end = user


def _reads_only(user: fx.Node, source: fx.Node) -> bool:
    """Whether the node takes one tensor, once, as its first argument."""
    first = user.args[0] if user.args else user.kwargs.get("input")
    return first is source and user.all_input_nodes == [source]


def _function_text(node: fx.Node) -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{name}()"


def _check_norm(chain: Chain, norm: Any, what: str) -> None:
    layer: Any = chain.modules[0]
    if type(norm) not in _BATCH_NORMS:
        raise Refused(f"{what} follows; {norm_text(norm)}")
    if norm.running_mean is None or norm.running_var is None:
        raise Refused(f"{what} keeps no running statistics, so its factors depend on the input")
    if chain.layer.activation is not None:
        raise Refused(f"{what} follows an activation")
    if is_parametrized(layer) or is_parametrized(norm):
        raise Refused(f"{what} cannot be folded: a parametrization computes the weights at each call")
    if norm.num_features != layer.out_channels:
        raise Refused(f"{what} has {norm.num_features} channels, the layer gives {layer.out_channels}")


def _rewrite(root: fx.GraphModule, chain: Chain) -> None:
    """Let the layer's call stand for the chain's end."""
    if chain.taken:
        chain.end.replace_all_uses_with(chain.node)
        for node in reversed(chain.absorbed):
            root.graph.erase_node(node)
    chain.end = chain.node


def _callable(chain: Chain) -> nn.Module:
    return twins.Batched(chain.layer) if chain.batched_only else chain.layer


def _call(root: fx.GraphModule, chain: Chain) -> None:
    """Let the node call the fused layer."""
    name = f"fused_{chain.name.replace('.', '_')}"
    root.add_submodule(name, _callable(chain))
    chain.node.target = name


def _concatenate(root: fx.GraphModule, chains: list[Chain], modules: dict[str, nn.Module]) -> None:
    """Let the layers whose results only feed a concatenation of channels write into its result."""
    position = {node: index for index, node in enumerate(root.graph.nodes)}
    order = list(root.graph.nodes)
    for cat in [node for node in order if node.target in CONCATENATIONS]:
        parts = cat.args[0] if cat.args else cat.kwargs.get("tensors")
        dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
        writers: list[Any] = [None] * len(parts) if isinstance(parts, (tuple, list)) else []
        found = [chain for chain in chains if chain.reason is None and list(chain.end.users) == [cat]]
        for chain in found:
            layer: Any = chain.modules[0]
            if not writers or parts.count(chain.end) != 1:
                chain.reason = "the concatenation takes its result more than once"
            elif dim not in (1, -1 - len(layer.kernel_size)):
                chain.reason = f"the concatenation joins axis {dim}, not the channels"
            elif (other := _first_impure(order[position[chain.node] + 1 : position[cat]], modules)) is not None:
                chain.reason = (
                    f"{_what(other, modules)} comes between the layer and the concatenation, and might change its input"
                )
            else:
                writers[parts.index(chain.end)] = chain
        if any(writers):
            writing = [chain for chain in writers if chain is not None]
            relu = _relu_behind(cat, writing, modules)
            for chain in writing:
                chain.taken += [_CONCATENATION, *([] if relu is None else [_what(relu, modules)])]
            _write_into(root, cat, list(parts), writers, relu)


def _relu_behind(cat: fx.Node, writers: list[Chain], modules: dict[str, nn.Module]) -> fx.Node | None:
    """The ReLU that alone uses the concatenation, taken into the layers that write into it; None where that is not so.

    Of the activations it alone may come twice, and before what `torch.cat` may convert.
    """
    users = list(cat.users)
    module = modules.get(_target(users[0])) if users else None
    if len(users) != 1 or not _reads_only(users[0], cat) or activation_of(users[0], module) != "relu":
        return None
    if module is not None and (has_hooks(module) or module.training):
        return None
    for chain in writers:
        if chain.layer.activation not in (None, "relu") or chain.modules[0].weight.dtype.is_complex:
            return None
    for chain in writers:
        chain.layer.activation = "relu"
        chain.modules += [] if module is None else [module]
    return users[0]


def _write_into(root: fx.GraphModule, cat: fx.Node, parts: list[Any], writers: list[Any], relu: fx.Node | None) -> None:
    values = []
    for part, chain in zip(parts, writers):
        if chain is None:
            values.append(part)
            continue
        node = chain.node
        size = node.args[1] if len(node.args) > 1 else node.kwargs.get("output_size")
        values.append((node.args[0] if node.args else node.kwargs["input"], size))
    name = f"concatenation_{cat.name}"
    makers = [None if chain is None else _callable(chain) for chain in writers]
    root.add_submodule(name, twins.Concatenation(makers, relu is not None))
    with root.graph.inserting_before(cat):
        joined = root.graph.call_module(name, tuple(values))
    last = cat if relu is None else relu
    last.replace_all_uses_with(joined)
    for node in dict.fromkeys((last, cat, *(chain.node for chain in writers if chain is not None))):
        root.graph.erase_node(node)


def _what(node: fx.Node, modules: dict[str, nn.Module]) -> str:
    module = modules.get(_target(node))
    return _function_text(node) if module is None else f"{type(module).__name__} {_target(node)}"


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_IN_PLACE = frozenset(("setitem", "__setitem__", *(f"i{name}" for name in _OPERATORS)))


def _first_impure(between: list[fx.Node], modules: dict[str, nn.Module]) -> fx.Node | None:
    """The first of the nodes that might change a tensor in place, as far as can be told: the layer will run after them."""
    for node in between:
        module = modules.get(_target(node))
        if module is not None:
            known = type(module).__module__.startswith("torch.nn.modules") or isinstance(module, _OURS)
            pure = known and not has_hooks(module) and not getattr(module, "inplace", False)
        else:
            pure = node.op in ("get_attr", "placeholder") or _is_pure_call(node)
        if not pure:
            return node
    return None


def _is_pure_call(node: fx.Node) -> bool:
    """Whether a function or method of torch's changes none of its arguments, by the way torch names and flags those that do."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", "_")
    home = "torch" if node.op == "call_method" else str(getattr(node.target, "__module__", None) or "torch")
    if home.partition(".")[0] not in ("torch", "_operator", "builtins") or name.endswith("_") or name in _IN_PLACE:
        return False
    flags = (*node.args, node.kwargs.get("inplace"))
    return not any(flag is True for flag in flags) and node.kwargs.get("out") is None
