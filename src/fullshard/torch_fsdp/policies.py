"""The policies of torch's `fully_shard`, and what they mean to this engine.

torch's own objects are taken as well as these: only their fields are read, so a script may go on importing
them from torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.errors import OptionError
from fullshard.policy import Casts
from fullshard.precision import Precision


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """How the parameters of one `fully_shard` call compute.

    param_dtype: dtype of full parameters and of the forward; None is the parameter's own.
    reduce_dtype: dtype of gradients between ranks. They are summed in fp32 whatever it is.
    output_dtype: dtype of the module's floating point outputs; None leaves them.
    cast_forward_inputs: floating point inputs of the module are cast to param_dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass
class OffloadPolicy:
    """No offload."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Parameters, gradients and optimizer state rest in host memory: `fs.shard(offload="host")`.

    pin_memory: accepted, without effect: host memory is page-locked where there is a GPU.
    """

    pin_memory: bool = True


@dataclass
class DataParallelMeshDims:
    """Names the data parallel axes of a larger mesh. `fully_shard` raises NotSupported; pass mesh[axis]."""

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise OptionError("DataParallelMeshDims names no axis", "Give shard=, replicate= or both.")


def as_mixed_precision(policy: Any) -> MixedPrecisionPolicy:
    """A policy of ours, or any object with the same fields."""
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    if policy is None:
        return MixedPrecisionPolicy()
    fields = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    missing = [name for name in fields if not hasattr(policy, name)]
    if missing:
        raise OptionError(
            f"mp_policy is a {type(policy).__name__} without {', '.join(missing)}",
            "Give a MixedPrecisionPolicy.",
        )
    return MixedPrecisionPolicy(*(getattr(policy, name) for name in fields))


def is_offloaded(policy: Any) -> bool:
    """Whether a policy, of torch's classes or of these, keeps values in host memory."""
    kinds = {kind.__name__ for kind in type(policy).__mro__}
    if policy is None or "OffloadPolicy" in kinds:
        return "CPUOffloadPolicy" in kinds
    raise OptionError(f"offload_policy is {policy!r}", "Give an OffloadPolicy or a CPUOffloadPolicy.")


def precision_of(policy: MixedPrecisionPolicy, parameters: Iterable[nn.Parameter]) -> Precision:
    """The engine's precision for these parameters.

    A parameter that already has `param_dtype` keeps it at rest, as in torch: `compute=bf16` would give a bf16
    model fp32 masters. Gradients are not sent in a wider dtype than they were computed in: they are summed in
    fp32 by the receiver, which is the same sum for fewer bytes.
    """
    floats = {p.dtype for p in parameters if p.dtype.is_floating_point}
    compute = policy.param_dtype
    if compute is not None and floats <= {compute}:
        compute = None
    computed = min((d.itemsize for d in floats), default=4) if compute is None else compute.itemsize
    wire = policy.reduce_dtype
    if wire is not None and wire.itemsize > computed:
        wire = None
    total = policy.reduce_dtype if policy.reduce_dtype == torch.float64 else torch.float32
    return Precision(compute=compute, wire=wire, reduce=total)


def casts_of(policy: MixedPrecisionPolicy) -> Casts:
    return policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype
