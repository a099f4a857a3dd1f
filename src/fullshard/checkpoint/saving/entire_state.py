"""Optimizer state of entire tensors, which one rank has: it writes them, and all ranks list them.

State may be anything here: tensors of any shape, in lists and dicts. Each value is a tree, as extra values
are; its large tensors are tensors of the optimizer's files, under the path of the value.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from fullshard.checkpoint.format.headers import Tensor
from fullshard.checkpoint.format.values import Encoder, Tree
from fullshard.checkpoint.parameters import Site, plain
from fullshard.comm.groups import Comm
from fullshard.engine.step.owned import OwnedStep
from fullshard.precision import DTYPES
from fullshard.state.tensor_subclasses import taken_apart

Slice = tuple[Tensor, int, torch.Tensor]  # a tensor, how many of its elements this rank writes, and these


def collect(
    order: list[Site], optimizer: torch.optim.Optimizer, owned: OwnedStep, comm: Comm
) -> tuple[dict[str, dict[str, Tree]], list[Slice]]:
    """State by parameter and key, and the tensors in it: the same lists on all ranks, which must call it."""
    encoder = Encoder(of_optimizer=True)
    own: dict[str, dict[str, Tree]] = {}
    for site in order:
        if _writes(owned, site, comm):
            values = optimizer.state.get(site.parameter, {})
            if values:
                own[site.name] = {key: _entry(encoder, site, key, value) for key, value in values.items()}
    listed = {
        path: [str(t.dtype).removeprefix("torch."), list(t.shape)] for path, t in encoder.tensors.items()
    }
    state: dict[str, dict[str, Tree]] = {}
    slices: list[Slice] = []
    for theirs, tensors in comm.world.all_gather_object([own, listed]):
        state |= theirs
        for path, (dtype, shape) in tensors.items():
            here = encoder.tensors.get(path)
            flat = torch.empty(0, dtype=DTYPES[dtype]) if here is None else here.view(-1)
            slices.append(
                (Tensor(path, DTYPES[dtype], tuple(shape)), 0 if here is None else prod(shape), flat)
            )
    return state, slices


def _writes(owned: OwnedStep, site: Site, comm: Comm) -> bool:
    if owned.gathered:
        return bool(comm.world_rank == comm.world.members[0])
    return owned.owns(site.parameter) and comm.replica == 0


def _entry(encoder: Encoder, site: Site, key: Any, value: Any) -> Tree:
    on_host = isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu"
    value = taken_apart(value)
    if isinstance(value, torch.Tensor):
        value = plain(value)
    tree = encoder.encode(value, f"{site.name}.{key}")
    return {"kind": "entire", "value": tree, "device": "host" if on_host else "device"}
