"""A module's forward as a graph of torch.fx, or the reason why none can stand for it.

Tracing runs the forward once on stand-ins and keeps what was called. Whatever else the forward does, or decides by looking at a
stand-in, would be frozen; the checks here turn such a forward away instead.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError
from torch.nn.modules.conv import _ConvTransposeNd

from .dispatch import current

# Where a module keeps who is told of its calls.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONSTANTS = (type(None), bool, int, float, str)


class Untraceable(Exception):
    """Why a graph cannot stand for a forward."""


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody is told of the module's calls."""
    return any(module.__dict__.get(name) for name in HOOKS)


def holds_layers(module: nn.Module) -> bool:
    """Whether the module is, or contains, a transposed convolution."""
    return any(isinstance(part, _ConvTransposeNd) for part in module.modules())


def required_inputs(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the arguments that a call must give; the others keep their defaults in a graph.

    Raises:
        Untraceable: one of them can be given by its name only, or no signature is known.
    """
    try:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
    except (TypeError, ValueError):
        raise Untraceable("its forward has no signature") from None
    needed = [one for one in parameters if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    if any(one.kind is one.KEYWORD_ONLY for one in needed):
        raise Untraceable("its forward has arguments that must be given by name")
    return tuple(one.name for one in needed)


def record(root: nn.Module, is_inlined: Callable[[nn.Module], bool]) -> fx.Graph:
    """Trace the forward of `root` with its required arguments.

    Args:
        root: as it will run; it is afterwards as it was.
        is_inlined: which of the modules inside become part of the graph; the others stay calls.

    Raises:
        Untraceable: a graph would not do what the forward does.
    """
    if "forward" in root.__dict__:
        raise Untraceable("the instance has its own forward")
    if isinstance(root, (nn.ModuleList, nn.ModuleDict)):
        raise Untraceable("it only holds other modules")
    draws = random.getstate(), torch.get_rng_state()
    if not required_inputs(type(root).forward):
        raise Untraceable("its forward has no arguments of its own")
    before = _entries(root)
    try:
        with warnings.catch_warnings(), torch.no_grad(), _no_autocast_inside():
            warnings.simplefilter("ignore")
            graph = _Recorder(is_inlined).trace(root)
    except Untraceable:
        raise
    except Exception as error:  # the forward's own, on stand-ins
        text = str(error).strip().partition("\n")[0] or type(error).__name__
        raise Untraceable(f"torch.fx cannot trace it: {text}") from None
    finally:
        changed = _restore_entries(before)
        drew = draws[0] != random.getstate() or not torch.equal(draws[1], torch.get_rng_state())
        random.setstate(draws[0])
        torch.set_rng_state(draws[1])
    if changed:
        raise Untraceable("its forward makes tensors or sets attributes of its own, which a graph would freeze")
    if drew:
        raise Untraceable("its forward draws random numbers, which a graph would freeze")
    return graph


class _StandIn(fx.Proxy):
    """A value in tracing that refuses to be taken for no tensor: ``isinstance(x, Tensor)`` would say so."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        caller = sys._getframe(1)
        if caller.f_code.co_name != "is_tensor" and str(caller.f_globals.get("__name__", "")).partition(".")[0] == "torch":
            return _StandIn
        raise TraceError("its forward asks for the type of a value")


class _Recorder(fx.Tracer):
    """Traces the required arguments of a forward, through some of the modules inside."""

    proxy_buffer_attributes = True

    def __init__(self, is_inlined: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._is_inlined = is_inlined
        self._modes = _modes()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether `m` stays one call."""
        return not self._is_inlined(m)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A stand-in for what the node gives."""
        return _StandIn(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Note one call, which must be made under the modes that surround the forward."""
        if _modes() != self._modes:
            raise Untraceable("its forward changes torch's or upfold's modes")
        return super().create_node(*args, **kwargs)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Stand-ins for the arguments without a default; the others keep theirs, so that what is None stays None."""
        stand_ins = [self.create_proxy("placeholder", name, (), {}) for name in required_inputs(root_fn)]

        def run(*arguments: Any) -> Any:
            result = root_fn(*arguments)
            _check_result(result)
            return result

        return run, [self.root, *stand_ins]


def _modes() -> tuple[Any, ...]:
    return torch.is_grad_enabled(), torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(), current()


def _check_result(result: Any) -> None:
    """Refuse containers that a graph would give back as plain ones, and tensors that it would freeze."""
    if type(result) is _StandIn or type(result) in _CONSTANTS:
        return
    if type(result) in (tuple, list):
        entries = result
    elif type(result) is dict:
        entries = result.values()
    elif issubclass(type(result), fx.Proxy):
        return
    else:
        raise Untraceable(f"its forward returns {type(result).__name__}, which a graph cannot make")
    for entry in entries:
        _check_result(entry)


@contextlib.contextmanager
def _no_autocast_inside() -> Iterator[None]:
    """Refuse forwards that open an autocast block, of which a graph keeps nothing."""
    cls: Any = torch.autocast
    enter = cls.__enter__

    def refuse(self: Any) -> Any:
        raise Untraceable("its forward opens an autocast block, of which a graph keeps nothing")

    cls.__enter__ = refuse
    try:
        yield
    finally:
        cls.__enter__ = enter


# Modules, what they hold, and what the dictionaries and lists among that hold.
Entries = list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]


def _entries(root: nn.Module) -> Entries:
    """What every module holds, one level deep."""
    own = [(module, dict(module.__dict__)) for module in root.modules() if not isinstance(module, torch.jit.ScriptModule)]
    return [
        (module, entries, {name: value.copy() for name, value in entries.items() if isinstance(value, (dict, list))})
        for module, entries in own
    ]


def _restore_entries(before: Entries) -> bool:
    """Put back what a trace changed; whether it changed anything."""
    changed = False
    for module, entries, inner in before:
        if not _same(module.__dict__, entries):
            changed = True
            module.__dict__.clear()
            module.__dict__.update(entries)
        for name, contents in inner.items():
            held = module.__dict__[name]
            if not _same(held, contents):
                changed = True
                held.clear()
                (held.update if isinstance(held, dict) else held.extend)(contents)
    return changed


def _same(a: Any, b: Any) -> bool:
    """Whether two dictionaries, or two lists, hold the same objects."""
    if len(a) != len(b):
        return False
    if isinstance(a, list):
        return all(one is other for one, other in zip(a, b))
    return all(key in b and value is b[key] for key, value in a.items())
