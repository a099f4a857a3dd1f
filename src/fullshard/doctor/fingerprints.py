"""Short digests of tensors: whether two ranks, or two moments, have the same values."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

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
        tensor = tensor.detach().as_subclass(torch.Tensor)
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
        }
        for tensor in tensors_in(value)
    ]


class RandomState:
    """The generators of torch, of every GPU in use, of numpy and of Python, and those that modules hold."""

    def __init__(self, module: torch.nn.Module | None = None) -> None:
        self._host, self._python = torch.get_rng_state(), random.getstate()
        self._devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        held = [value for m in (() if module is None else module.modules()) for value in vars(m).values()]
        self._held = [(g, g.get_state()) for g in held if isinstance(g, torch.Generator)]

    def restore(self) -> None:
        torch.set_rng_state(self._host)
        random.setstate(self._python)
        if self._devices:
            torch.cuda.set_rng_state_all(self._devices)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for generator, state in self._held:
            generator.set_state(state)

    def digest(self) -> str:
        """Of torch's generators."""
        return "".join(fingerprint(state) for state in (self._host, *self._devices))
