"""Short digests of tensors: whether two ranks, or two moments, have the same values."""

from __future__ import annotations

import copy
import hashlib
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from fullshard.engine.homes.split_masters import restored
from fullshard.engine.tensors import tensors_in

_ROWS = 64
_BYTES = 16 * 2**20  # of a tensor that are looked at; beyond that, evenly spaced elements


def fingerprint(tensor: torch.Tensor) -> str:
    """Equal for equal shape, dtype and values."""
    plain = _plain(tensor)
    digest = hashlib.blake2b(f"{tuple(plain.shape)}{plain.dtype}".encode(), digest_size=8)
    if plain.numel():
        digest.update(_content(plain))
    return digest.hexdigest()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        tensor = restored(tensor.detach()).as_subclass(torch.Tensor)
        return tensor.to_dense() if tensor.layout != torch.strided else tensor


def _content(plain: torch.Tensor) -> bytes:
    flat = plain.reshape(-1)
    if flat.numel() * flat.element_size() > _BYTES:
        flat = flat[:: flat.numel() * flat.element_size() // _BYTES + 1]
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    return flat.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def row_fingerprints(tensor: torch.Tensor) -> list[str]:
    """Of the first samples of a batch. Empty where a row has too few values to be recognised by them."""
    plain = _plain(tensor)
    if plain.dim() < 2 or plain[0].numel() < 4:
        return []
    return [fingerprint(row) for row in plain[:_ROWS] if is_varied(row)]


def is_varied(tensor: torch.Tensor) -> bool:
    """It has more than two different values, so that equal tensors are no accident."""
    plain = _plain(tensor).reshape(-1)[:4096]
    return plain.numel() > 2 and int(torch.unique(plain.cpu()).numel()) > 2


def described(value: Any) -> list[dict[str, Any]]:
    """The tensors of a module's arguments."""
    return [
        {
            "shape": list(tensor.shape),
            "print": fingerprint(tensor),
            "rows": row_fingerprints(tensor),
            "varied": is_varied(tensor),
            "integers": not (tensor.is_floating_point() or tensor.is_complex()),
        }
        for tensor in tensors_in(value)
    ]


@dataclass(frozen=True)
class _Held:
    """A generator of any library, with its state when it was looked at."""

    generator: Any
    state: Any
    set_state: Callable[[Any], Any]

    def has_drawn(self) -> bool:
        now = _held(self.generator)
        return now is not None and _digest(now.state) != _digest(self.state)


def _held(value: Any) -> _Held | None:
    if isinstance(value, torch.Generator):
        return _Held(value, value.get_state(), value.set_state)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return _Held(value, value.getstate(), value.setstate)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        bits: Any = value.bit_generator
        return _Held(value, copy.deepcopy(bits.state), lambda state: setattr(bits, "state", state))
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return _Held(value, value.get_state(), value.set_state)
    return None


def _digest(state: Any) -> str:
    return fingerprint(state) if isinstance(state, torch.Tensor) else repr(state)


def generators_in(module: torch.nn.Module) -> list[Any]:
    """Random generators that modules hold: in attributes, in lists and dicts, and in plain objects there."""
    found: dict[int, Any] = {}
    for one in module.modules():
        for value in vars(one).values():
            for inner in (value, *_inside(value)):
                if _held(inner) is not None:
                    found[id(inner)] = inner
    return list(found.values())


def _inside(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, torch.nn.Module | torch.Tensor | type | ModuleType):
        return []
    return list(getattr(value, "__dict__", {}).values())


class RandomState:
    """The generators of torch, of every GPU in use, of numpy and of Python, and those that modules hold."""

    def __init__(self, module: torch.nn.Module | None = None) -> None:
        self._host, self._python = torch.get_rng_state(), random.getstate()
        self._devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        held = [] if module is None else map(_held, generators_in(module))
        self._held = [one for one in held if one is not None]

    def restore(self) -> None:
        torch.set_rng_state(self._host)
        random.setstate(self._python)
        if self._devices:
            torch.cuda.set_rng_state_all(self._devices)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for one in self._held:
            one.set_state(one.state)

    def digest(self) -> str:
        """Of torch's generators."""
        return "".join(fingerprint(state) for state in (self._host, *self._devices))

    def has_drawn(self) -> bool:
        """Whether any generator has drawn since."""
        now = RandomState()
        return (
            now.digest() != self.digest()
            or now._python != self._python
            or repr(now._numpy) != repr(self._numpy)
            or any(one.has_drawn() for one in self._held)
        )
