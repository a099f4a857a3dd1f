"""Tensors that have a place by name only: what is computed with them is computed with values elsewhere.

Torch's dispatch sees every function, but not what takes memory from a tensor: there the pointer is null, and
using it ends the process. So pointers are refused where kernels ask for them, and storages have their size
and identity, but no contents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

_T = TypeVar("_T", bound=torch.Tensor)
_ABOUT = """
_cdata _checkpoint_offset _expired _fake_device _fix_weakref _free_weak_ref _weak_ref device element_size
get_device is_cuda is_hpu is_pinned is_shared is_sparse is_sparse_csr nbytes resizable size type untyped
"""
_OF_VALUES = """
__copy__ __deepcopy__ __getitem__ __iter__ __reduce__ __reduce_ex__ __setitem__
"""


class WithoutMemory:
    """The methods of a tensor that take memory without asking `__torch_dispatch__`, refused. A base beside
    `torch.Tensor`, before it."""

    __slots__ = ()

    @staticmethod
    def refuse_memory(name: str) -> NoReturn:
        raise NotImplementedError

    def data_ptr(self) -> int:
        self.refuse_memory("data_ptr")

    def storage(self) -> Any:
        self.refuse_memory("storage")

    def _typed_storage(self) -> Any:
        self.refuse_memory("storage")

    def share_memory_(self) -> Any:
        self.refuse_memory("share_memory_")

    def apply_(self, *_: Any) -> Any:
        self.refuse_memory("apply_")

    def map_(self, *_: Any) -> Any:
        self.refuse_memory("map_")

    def map2_(self, *_: Any) -> Any:
        self.refuse_memory("map2_")

    def __dlpack__(self, **_: Any) -> Any:
        self.refuse_memory("dlpack")

    def is_shared(self) -> bool:
        return False


def without_memory(kind: type[_T], view: torch.Tensor, dtype: torch.dtype, device: torch.device) -> _T:
    """A tensor at the place of `view`."""
    made: _T = torch.Tensor._make_wrapper_subclass(
        kind,
        view.shape,
        strides=view.stride(),
        storage_offset=view.storage_offset(),
        dtype=dtype,
        device=device,
    )
    torch._C._set_throw_on_mutable_data_ptr(made)
    return made


def storages(refuse: Callable[[str], NoReturn]) -> Callable[[torch.Tensor], torch.UntypedStorage]:
    """`untyped_storage` of such tensors. What its methods would do with memory is refused, by name."""
    names = {name for name in dir(torch.UntypedStorage) if not name.startswith("__")} - set(_ABOUT.split())
    names.update(_OF_VALUES.split())
    body: dict[str, Any] = {name: _refusing(name, refuse) for name in names}
    body["__repr__"] = lambda storage: f"<a storage of {storage.nbytes()} bytes by name only>"
    kind = type("UntypedStorage", (torch.UntypedStorage,), body)

    def untyped_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
        storage = torch.Tensor.untyped_storage(tensor)
        storage.__class__ = kind
        return storage

    return untyped_storage


def _refusing(name: str, refuse: Callable[[str], NoReturn]) -> Callable[..., NoReturn]:
    return lambda *_, **__: refuse(f"untyped_storage().{name}")
