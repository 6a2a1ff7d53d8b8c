"""Fuse what follows a model's transposed convolutions into them, for inference, in place; `restore` undoes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.utils.parametrize import is_parametrized

from .followers import follows_alone
from .fused_model import Plan, install, own_forward, uninstall, version_of
from .fusion import Chain, fuse_graph
from .recording import Untraceable, has_hooks, holds_layers, record, required_inputs
from .replace import find, replace
from .report import FuseReport, FuseRow


def fuse(model: nn.Module) -> FuseReport:
    """Replace the transposed convolutions of a model and fuse what follows them into them, for inference, in place.

    A batch norm becomes part of the weights and the bias, the activation becomes the layer's epilogue, a slice or a negative
    padding becomes its `crop`, and where the result only feeds a concatenation of channels the layer writes straight into
    that; a ReLU behind the concatenation is then taken into its parts.
    What follows is read from a graph of ``torch.fx``: of the whole model where it can be traced, else of those of its parts that
    can. A part runs its graph in evaluation mode, when no gradient is asked for, on tensors for its required arguments; in every
    other case, and with hooks on what was fused, it runs its own forward. So training goes on as before. Parameters and the
    state_dict stay the model's; folded weights are copies, made anew after ``train()``, ``eval()``, ``to()``,
    ``load_state_dict()`` and changes in place. Nobody else has these, so that what kernels pack of them is kept from call to
    call, as `freeze` keeps it, until `unfreeze`.

    A graph holds what the forward's Python decided when it was made: call `fuse` again after changing attributes of the model,
    and after changing weights of a model that ``torch.compile`` has compiled already.

    Args:
        model: any module, in evaluation mode. Its layers of torch's are replaced first, as by ``upfold.replace``.

    Returns:
        A `FuseReport`: for each transposed convolution what was fused into it, and why no more was.
    """
    replace(model)
    uninstall(model)
    walk = _Walk(model)
    walk.visit(model, "", None)
    return FuseReport(tuple(walk.rows()))


def make_plan(root: nn.Module) -> Plan:
    """A plan for one module, or one that never applies where nothing can be fused."""
    try:
        with own_forward(root):
            plan, chains, _ = _planned(root)
    except Untraceable:
        return Plan(None, (), (), ())
    return plan if any(chain.taken for chain in chains) else Plan(None, (), (), ())


class _Walk:
    """Visits the parts of a model, the largest first, and fuses those that can be traced."""

    def __init__(self, model: nn.Module) -> None:
        self._found = {entry.layer: entry for entry in find(model)}
        self._chains: dict[nn.Module, Chain] = {}
        self._reasons: dict[nn.Module, str] = {}

    def visit(self, module: nn.Module, path: str, why: str | None) -> None:
        """Fuse `module`, or its parts; `why` says what keeps the module that holds it from being fused."""
        if isinstance(module, _ConvTransposeNd):
            self._reasons.setdefault(module, why or "it is used by itself")
            return
        if isinstance(module, torch.jit.ScriptModule) or not holds_layers(module):
            return
        try:
            plan, chains, leaves = _planned(module)
        except Untraceable as reason:
            self._visit_parts(module, path, why if _only_holds(module) else f"{_named(module, path)}: {reason}")
            return
        if any(chain.taken for chain in chains):
            try:
                install(module, plan)
            except TypeError as error:  # what `__init_subclass__`, a metaclass or `__slots__` may raise
                self._visit_parts(module, path, f"{_named(module, path)}: its class cannot be changed: {error}")
                return
        for chain in chains:
            self._chains.setdefault(chain.modules[0], chain)
        for name, leaf in leaves:
            self.visit(leaf, _joined(path, name), f"{type(leaf).__name__} has hooks or is called by itself")
        for part in module.modules():
            if isinstance(part, _ConvTransposeNd):
                self._reasons.setdefault(part, f"{_named(module, path)} does not call it")

    def _visit_parts(self, module: nn.Module, path: str, why: str | None) -> None:
        for name, part in module.named_children():
            self.visit(part, _joined(path, name), why)

    def rows(self) -> Iterator[FuseRow]:
        """A row for each transposed convolution of the model."""
        for layer, entry in self._found.items():
            if not isinstance(layer, _ConvTransposeNd):
                continue
            kind = type(layer).__name__.removeprefix("Parametrized").removeprefix("Replaced")
            chain = self._chains.get(layer)
            if entry.refusal is not None:
                yield FuseRow(entry.name, kind, "left alone", (), entry.refusal)
            elif chain is None:
                yield FuseRow(entry.name, kind, "replaced", (), self._reasons.get(layer))
            else:
                yield FuseRow(entry.name, kind, "fused" if chain.taken else "replaced", tuple(chain.taken), chain.reason)


def _planned(root: nn.Module) -> tuple[Plan, list[Chain], list[tuple[str, nn.Module]]]:
    """The plan for a module, what was taken into each layer, and the parts of it that stay calls but hold layers.

    Raises:
        Untraceable: the module's forward has no graph.
    """
    if root.training:
        raise Untraceable("it is in training mode; call eval() first")
    if is_parametrized(root):
        raise Untraceable("it has parametrizations of its own")
    graph = record(root, _is_inlined)
    modules = {name: part for name, part in root.named_modules() if name}
    inlined = [part for part in root.modules() if part is not root and _is_inlined(part)]
    if any(part.training for part in inlined):
        raise Untraceable("a part of it is in training mode")
    called = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    leaves = {name: modules[name] for name in called if not isinstance(modules[name], _ConvTransposeNd)}
    runner = fx.GraphModule(root, graph)
    chains = fuse_graph(runner, modules)
    bypassed = [*inlined, *(module for chain in chains if chain.taken for module in chain.modules)]
    sources = [source for chain in chains for module in chain.read for source in _sources(module, counted=True)]
    for node in graph.nodes:
        if node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            sources += [source for source in _sources(root.get_submodule(owner), counted=False) if source[1] == name]
    layers = {chain.name: chain.layer for chain in chains if chain.taken}
    plan = Plan(runner, required_inputs(type(root).forward), tuple(dict.fromkeys(bypassed)), tuple(sources), layers)
    return plan, chains, [(name, leaf) for name, leaf in leaves.items() if holds_layers(leaf)]


def _sources(module: nn.Module, counted: bool) -> Iterator[tuple[dict[str, Any], str, Any, int | None]]:
    """A module's own parameters and buffers, as a plan watches them."""
    for entries in (module._parameters, module._buffers):
        for name, tensor in entries.items():
            if name != "num_batches_tracked":
                yield entries, name, tensor, version_of(tensor) if counted else None


def _is_inlined(module: nn.Module) -> bool:
    """Whether a module's forward becomes part of the graph around it.

    So do those that hold layers, and sequences of what may follow one, as far as nobody listens to their calls.
    """
    if isinstance(module, (torch.jit.ScriptModule, _ConvTransposeNd)) or has_hooks(module) or "forward" in module.__dict__:
        return False
    if holds_layers(module):
        return True
    return isinstance(module, nn.Sequential) and all(map(follows_alone, module)) and type(module).forward is nn.Sequential.forward


def _only_holds(module: nn.Module) -> bool:
    """Whether the module has no forward of its own."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _named(module: nn.Module, path: str) -> str:
    return f"{type(module).__name__} {path}".rstrip()
