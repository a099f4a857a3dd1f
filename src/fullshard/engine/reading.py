"""A parameter of a unit at rest, read by other code of the model while the model computes.

`self.child.weight.shape` in a parent's forward must not depend on whether the child is a unit of its own. At
rest a module's `_parameters` is a RestParameters. Outside a pass it shows the user's own parameters, which
hold shards. Inside a pass it shows a Reading: its shape, dtype and device are those of the full value; any
other use gathers the unit first and applies to the compute parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullshard.engine.tensors import map_tensors

# What a compute parameter answers without memory, by name of the function or property.
_WITHOUT_VALUES = {
    *(
        "shape",
        "size",
        "numel",
        "nelement",
        "dim",
        "ndim",
        "ndimension",
        "stride",
        "__len__",
        "storage_offset",
    ),
    *(
        "dtype",
        "device",
        "layout",
        "element_size",
        "itemsize",
        "nbytes",
        "is_contiguous",
        "dim_order",
        "names",
    ),
    *("requires_grad", "is_leaf", "grad_fn", "output_nr", "grad_dtype", "is_inference", "get_device"),
    *("is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg", "is_cuda", "is_cpu", "is_meta"),
    *("is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xla"),
}
# What concerns the user's own parameter, by name.
_OF_THE_SHARDED = {
    *("grad", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
    *("_backward_hooks", "_post_accumulate_grad_hooks"),
}


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):  # of a property
        return getattr(func.__self__, "__name__", name)
    return name


class Reading(nn.Parameter):
    """Stands for a parameter of a unit that is not computing."""

    sharded: nn.Parameter
    compute: nn.Parameter
    make_full: Callable[[nn.Parameter], None]

    @staticmethod
    def make(
        sharded: nn.Parameter, compute: nn.Parameter, make_full: Callable[[nn.Parameter], None]
    ) -> Reading:
        reading: Reading = torch.Tensor._make_subclass(Reading, compute.detach(), sharded.requires_grad)
        reading.sharded, reading.compute, reading.make_full = sharded, compute, make_full
        return reading

    def full(self) -> nn.Parameter:
        """The compute parameter, whose unit is full when this returns."""
        self.make_full(self.sharded)
        return self.compute

    @property
    def data(self) -> torch.Tensor:
        return self.full().data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.full().data = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.full(), memo)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, _name(func)
        if name in _WITHOUT_VALUES and getattr(func, "__name__", "") != "__set__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        own = name in _OF_THE_SHARDED or name in _WITHOUT_VALUES  # the latter: `p.requires_grad = False`
        change = _sharded if own else _full
        return func(*map_tensors(args, change, objects=False), **map_tensors(kwargs, change, objects=False))


def _sharded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.sharded if isinstance(tensor, Reading) else tensor


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full() if isinstance(tensor, Reading) else tensor


class RestParameters(dict[str, Any]):
    """A module's `_parameters` while they are at rest. `show` chooses what a reader gets of each."""

    __slots__ = ("changed", "is_read_in_a_pass", "show")

    def __init__(
        self, values: dict[str, Any], is_read_in_a_pass: Callable[[], bool], show: Callable[[Any], Any]
    ) -> None:
        super().__init__(values)
        self.is_read_in_a_pass, self.show = is_read_in_a_pass, show
        self.changed = False  # entries were set or removed, perhaps to what they are

    def raw(self, key: str) -> Any:
        """The user's own parameter."""
        return dict.get(self, key)

    def put(self, key: str, value: Any) -> None:
        """Set by the engine."""
        dict.__setitem__(self, key, value)

    def __getitem__(self, key: str) -> Any:
        value = dict.__getitem__(self, key)
        return self.show(value) if self.is_read_in_a_pass() else value

    def get(self, key: str, default: Any = None) -> Any:
        value = dict.get(self, key, default)
        return self.show(value) if self.is_read_in_a_pass() else value

    def items(self) -> Any:
        return self._shown().items() if self.is_read_in_a_pass() else dict.items(self)

    def values(self) -> Any:
        return self._shown().values() if self.is_read_in_a_pass() else dict.values(self)

    def _shown(self) -> dict[str, Any]:
        return {key: self.show(value) for key, value in dict.items(self)}

    def __setitem__(self, key: str, value: Any) -> None:
        self.changed = True
        dict.__setitem__(self, key, _sharded(value) if isinstance(value, Reading) else value)

    def __delitem__(self, key: str) -> None:
        self.changed = True
        dict.__delitem__(self, key)

    def pop(self, key: str, *default: Any) -> Any:
        self.changed = True
        return dict.pop(self, key, *default)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: copy.deepcopy(value, memo) for key, value in dict.items(self)}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(dict.items(self)),)
