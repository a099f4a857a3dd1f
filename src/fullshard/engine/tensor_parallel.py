"""Values and gradients that may be DTensors: this rank's part of them, and every element."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.plan.tensor_parallel import Spec, is_cut, local_of, part_of, region_of


def local_gradients(
    gradients: Sequence[torch.Tensor | None], specs: Sequence[Spec | None]
) -> list[torch.Tensor | None]:
    """This rank's part of each gradient, cut as its parameter is.

    Autograd leaves some as partial sums (the weight of a norm whose input is cut by tokens): those are summed
    here over the tensor-parallel ranks.
    """
    local: list[torch.Tensor | None] = []
    for gradient, spec in zip(gradients, specs, strict=True):
        if spec is not None and is_cut(gradient):
            if tuple(gradient.placements) != spec.placements:
                gradient = gradient.redistribute(placements=spec.placements)
            gradient = gradient._local_tensor
            wait = getattr(gradient, "wait", None)  # of an asynchronous result
            gradient = gradient if wait is None else wait()
        local.append(gradient)
    return local


def uncut(tensor: torch.Tensor) -> torch.Tensor:
    """Every element of a DTensor, on every rank of its mesh: a collective. Any other tensor as it is."""
    with torch.no_grad():
        return tensor.full_tensor() if is_cut(tensor) else tensor


def put(into: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value of every element into a tensor; into a DTensor, each rank copies its own part."""
    if is_cut(into):
        value = part_of(value, region_of(into, into.device_mesh))
    local_of(into).detach().copy_(value)
