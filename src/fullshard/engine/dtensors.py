"""Tensor-parallel parameters of the user: DTensors while their unit is full, plain shards at rest.

While a unit is full its modules show DTensors over the full part, so torch's hooks and operators work. At
rest, and in optimizers, the user's parameter is a plain tensor of this rank's elements. It stays the same
object: its contents and its class are exchanged. Replacing the objects instead, as others do, would leave an
optimizer that was built before sharding with parameters that nobody trains.

Importing DTensor takes a second, so this module is imported by the first DTensor that is met.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.utils import _foreach_utils

from fullshard.errors import StateError
from fullshard.plan.tensor_parallel import SPEC_ATTRIBUTE, Spec, is_cut, local_of, spec_of


class ShardedParameter(torch.Tensor):
    """A tensor-parallel parameter at rest: a plain tensor of this rank's elements, and an nn.Parameter to
    isinstance.

    Its slots are those of DTensor, unused: Python lets an object change its class only to one of the same
    memory layout.
    """

    __slots__ = tuple(getattr(DTensor, "__slots__", ()))
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        copied: ShardedParameter = sharded_parameter(
            self.data.clone(), self.requires_grad, self.__dict__[SPEC_ATTRIBUTE]
        )
        copied.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.data.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter containing:\n{self.data!r}"


# Optimizers then take their fast paths by default, as for any other parameter.
_supported = getattr(_foreach_utils, "_foreach_supported_types", None)
if isinstance(_supported, list) and ShardedParameter not in _supported:
    _supported.append(ShardedParameter)


def sharded_parameter(values: torch.Tensor, requires_grad: bool, spec: Spec) -> Any:
    """A new parameter of the kind that the user's are at rest."""
    parameter = torch.Tensor._make_subclass(ShardedParameter, values, requires_grad)
    parameter.__dict__["_is_param"] = True  # how torch recognises a Parameter of another class
    parameter.__dict__[SPEC_ATTRIBUTE] = spec
    return parameter


def make_plain(parameter: torch.Tensor) -> torch.Tensor:
    """Turn the user's DTensor into a plain tensor. Returns the DTensor, for `restore_dtensor`."""
    spec = spec_of(parameter)
    assert spec is not None
    twin: torch.Tensor = sharded_parameter(local_of(parameter).detach(), parameter.requires_grad, spec)
    exchange(parameter, twin)
    return twin


def restore_dtensor(parameter: torch.Tensor, twin: torch.Tensor) -> None:
    """Undo `make_plain`."""
    exchange(parameter, twin)
    parameter.__dict__.pop(SPEC_ATTRIBUTE, None)


def exchange(parameter: torch.Tensor, twin: torch.Tensor) -> None:
    """Exchange the contents and classes of the two objects; attributes and hooks stay with `parameter`.

    torch.utils.swap_tensors does the same, but refuses while a graph holds the contents, such as that of a
    forward inside fs.full whose result is kept. Here such a graph keeps the twin, and raises an error when it
    is about to give it a gradient.
    """
    if is_cut(parameter) and parameter.requires_grad:
        get_gradient_edge(parameter).node.register_prehook(_refuse_late_backward)
    kind, held, others = type(parameter), _slots(parameter), {**twin.__dict__, **parameter.__dict__}
    parameter.__class__ = type(twin)
    _fill_slots(parameter, _slots(twin))
    twin.__class__ = kind
    _fill_slots(twin, held)
    parameter.__dict__.update(others)
    twin.__dict__.update(others)
    torch._C._swap_tensor_impl(parameter, twin)
    hooks = parameter._post_accumulate_grad_hooks
    if hooks is not None:  # kept by the object, but autograd has them registered for the other contents
        parameter._post_accumulate_grad_hooks = hooks


def _slots(tensor: torch.Tensor) -> dict[str, Any]:
    return {name: getattr(tensor, name) for name in ShardedParameter.__slots__ if hasattr(tensor, name)}


def _fill_slots(tensor: torch.Tensor, values: dict[str, Any]) -> None:
    for name in ShardedParameter.__slots__:
        if name in values:
            setattr(tensor, name, values[name])
        elif hasattr(tensor, name):
            delattr(tensor, name)


def _refuse_late_backward(_: Any) -> None:
    raise StateError(
        "backward through a forward that ran inside fs.full, or before fs.shard",
        "Run training forwards on the sharded model, outside fs.full.",
    )


def show_dtensor(parameter: torch.Tensor, spec: Spec, part: torch.Tensor) -> torch.Tensor:
    """Inside fs.full, turn the user's object into the DTensor that it was. Returns the plain tensor."""
    twin = nn.Parameter(spec.wrap(part), requires_grad=parameter.requires_grad)
    exchange(parameter, twin)
    return twin
