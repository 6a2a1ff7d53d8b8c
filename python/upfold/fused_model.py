"""A module that runs a fused graph in place of its forward, and the rules for when it may.

As `replace` does, fusing changes the class of a module alone: its parameters, hooks and references stay. The plan, which holds
the graph and the folded weights, is no part of the state_dict and is made anew when something that it was made from has changed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from .recording import HOOKS
from .watch import is_compiling, transform_is_active

_PLAN = "_upfold_plan"
_ORIGIN = "_upfold_fuses"
_SET_BY_COMPILE = ("_is_torch_compile", "_compiled_call_impl")
_classes: dict[type[nn.Module], type[nn.Module]] = {}


@dataclass(frozen=True)
class Plan:
    """A fused forward.

    Attributes:
        run: the graph, compiled to Python, or None where the module cannot be fused any more.
        inputs: names of the arguments that it takes, all of them tensors.
        bypassed: modules whose calls are no longer made; the graph does what they do in evaluation mode without hooks.
        sources: entries of parameters or buffers, a name, and the tensor and version that the plan was made from; the version is
            None where changes in place are seen anyway.
        layers: what runs in place of a layer, by the layer's path.
    """

    run: nn.Module | None
    inputs: tuple[str, ...]
    bypassed: tuple[nn.Module, ...]
    sources: tuple[tuple[dict[str, Any], str, Tensor | None, int | None], ...]
    layers: dict[str, nn.Module] = field(default_factory=dict)
    # The bypassed modules' own entries and the tables of their hooks, flat, since every call looks at all of them.
    _entries: tuple[dict[str, Any], ...] = field(init=False, repr=False)
    _listeners: tuple[dict[int, Any], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        entries = tuple(module.__dict__ for module in self.bypassed)
        object.__setattr__(self, "_entries", entries)
        object.__setattr__(self, "_listeners", tuple(own[name] for own in entries for name in HOOKS if name in own))

    def is_fresh(self) -> bool:
        """Whether the tensors are still those that the plan was made from."""
        for entries, name, tensor, version in self.sources:
            if entries.get(name) is not tensor or (version is not None and tensor._version != version):  # type: ignore[union-attr]
                return False
        return True

    def applies(self) -> bool:
        """Whether the modules stand as the graph assumes."""
        if self.run is None or (not is_compiling() and (_global_forward_hooks or _global_forward_pre_hooks)):
            return False
        return not any(self._listeners) and not any(own["training"] for own in self._entries)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...] | None:
        """The graph's inputs of a call, or None where it gives others."""
        if kwargs:
            rest = self.inputs[len(args) :]
            if kwargs.keys() != set(rest):
                return None
            args = (*args, *(kwargs[name] for name in rest))
        if len(args) != len(self.inputs) or not all(isinstance(value, Tensor) for value in args):
            return None
        return args


def version_of(tensor: Tensor | None) -> int | None:
    """How often the tensor was changed in place, or None where torch does not count."""
    return None if tensor is None or tensor.is_inference() else int(tensor._version)


def needs_gradient(module: nn.Module, arguments: tuple[Tensor, ...]) -> bool:
    """Whether a call would be recorded for a backward, which must reach the module's own parameters."""
    if not torch.is_grad_enabled():
        return False
    return any(value.requires_grad for value in arguments) or any(value.requires_grad for value in module.parameters())


def install(module: nn.Module, plan: Plan) -> None:
    """Let the module run the plan."""
    module.__class__ = _fused_class(type(module))
    module.__dict__[_PLAN] = plan


def uninstall(model: nn.Module) -> list[nn.Module]:
    """Give every fused module its own forward back; which were fused."""
    fused = [module for module in model.modules() if is_fused(module)]
    for module in fused:
        module.__class__ = getattr(type(module), _ORIGIN)
        module.__dict__.pop(_PLAN, None)
    return fused


@contextlib.contextmanager
def own_forward(module: nn.Module) -> Iterator[None]:
    """Let a fused module be what it was, for a while."""
    fused = type(module)
    object.__setattr__(module, "__class__", fused.__dict__.get(_ORIGIN, fused))
    try:
        yield
    finally:
        object.__setattr__(module, "__class__", fused)


def is_fused(module: nn.Module) -> bool:
    """Whether the module runs, or will run, a plan."""
    return _ORIGIN in type(module).__dict__


def named_running(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a run in evaluation mode without gradients calls, by path: of fused parts what runs inside them."""
    modules = list(model.named_modules())
    plans = {name: _current_plan(module) for name, module in modules if is_fused(module)}
    bypassed = {part for plan in plans.values() if plan is not None and plan.applies() for part in plan.bypassed}
    yield from ((name, module) for name, module in modules if module not in bypassed)
    for path, plan in plans.items():
        if plan is not None and plan.applies():
            yield from ((f"{path}.{name}" if path else name, layer) for name, layer in plan.layers.items())


def plan_of(module: nn.Module) -> Plan | None:
    """The plan that the module has at hand."""
    return module.__dict__.get(_PLAN)


def _current_plan(module: nn.Module) -> Plan | None:
    plan = plan_of(module)
    if is_compiling() or (plan is not None and plan.is_fresh()):
        return plan
    from .fuse import make_plan  # which needs this module

    plan = make_plan(module)
    module.__dict__[_PLAN] = plan
    return plan


def _fused_class(cls: type[nn.Module]) -> type[nn.Module]:
    if cls in _classes:
        return _classes[cls]

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The fused graph, or the module's own forward where the graph does not stand for it.
        if not self.training and not transform_is_active():
            plan = _current_plan(self)
            if plan is not None and plan.applies():
                arguments = plan.arguments(args, kwargs)
                if plan.run is not None and arguments is not None and not needs_gradient(self, arguments):
                    return plan.run(*arguments)
        return cls.forward(self, *args, **kwargs)

    members: dict[str, Any] = {
        "forward": forward,
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": _reduce_ex,
        "__setattr__": _set_attribute,
        "__prepare_scriptable__": _original_copy,
        "train": _train,
        "_apply": _apply,
        "_load_from_state_dict": _load_from_state_dict,
        "_replicate_for_data_parallel": _replicate,
        _ORIGIN: cls,
    }
    _classes[cls] = type(f"Fused{cls.__name__}", (cls,), members)
    return _classes[cls]


def _original(module: Any) -> Any:
    return getattr(type(module), _ORIGIN)


def _set_attribute(self: Any, name: str, value: Any) -> None:
    """Set an attribute, which the plan might have been made from."""
    unchanged = name in self.__dict__ and self.__dict__[name] is value
    _original(self).__setattr__(self, name, value)
    if not unchanged and name not in _SET_BY_COMPILE:
        self.__dict__[_PLAN] = None


def _train(self: Any, mode: bool = True) -> Any:
    """Change the mode; the way to say that weights were changed unseen."""
    self.__dict__[_PLAN] = None
    return _original(self).train(self, mode)


def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Move or convert the module; the plan's own tensors are made anew from it."""
    self.__dict__[_PLAN] = None
    return _original(self)._apply(self, *args, **kwargs)


def _load_from_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
    self.__dict__[_PLAN] = None
    _original(self)._load_from_state_dict(self, *args, **kwargs)


def _replicate(self: Any) -> Any:
    """A replica on another device, which runs the module's own forward: the plan's tensors are on this one."""
    return _with_own_forward(_original(self)._replicate_for_data_parallel(self), _original(self))


def _original_copy(self: Any) -> nn.Module:
    """What TorchScript compiles: the same module with its own forward."""
    original = _original(self)
    other = original.__new__(original)
    other.__dict__.update(self.__dict__)
    return _with_own_forward(other, original)


def _with_own_forward(module: Any, original: type[nn.Module]) -> nn.Module:
    module.__class__ = original
    module.__dict__.pop(_PLAN, None)
    return module  # type: ignore[no-any-return]


def _reduce_ex(self: Any, protocol: Any) -> Any:
    """What copies and files hold: the module without its plan, which the copy makes when it first runs."""
    original = _original(self)
    function, args, *rest = original.__reduce_ex__(self, protocol)
    if rest and isinstance(rest[0], dict):
        rest[0] = {name: value for name, value in rest[0].items() if name != _PLAN}
    return _copied, (function, tuple(original if one is type(self) else one for one in args)), *rest


def _copied(function: Any, args: tuple[Any, ...]) -> nn.Module:
    module: nn.Module = function(*args)
    module.__class__ = _fused_class(type(module))
    return module
