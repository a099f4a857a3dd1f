"""torch's own FSDP2 (`fully_shard`) on the simulated cluster, to compare with. Nothing else imports it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fullshard.errors import OptionError
from fullshard.planning.decoder import fill
from fullshard.precision import Precision
from fullshard.tools.simulation.models import Subject, blocks_of

_RELEASES = {"zero3": True, "hybrid": True, "zero2": False, "zero1": False}


def fsdp2(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    strategy: str = "zero3",
    compute: torch.dtype | None = torch.bfloat16,
    reduce: torch.dtype | None = torch.bfloat16,
    best: bool = True,
    checkpoint_activations: bool = False,
    compiled: bool = False,
) -> list[nn.Module]:
    """Shard `model` in place, one group per block, as in torch's documents; returns the blocks.

    best: the last block is not released between forward and backward, and prefetch is explicit.
    """
    if strategy not in _RELEASES:
        raise OptionError(
            f"FSDP2 has no strategy {strategy!r}", f"Choose one of {', '.join(map(repr, _RELEASES))}."
        )
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    blocks: list[Any] = blocks_of(model)
    if checkpoint_activations:
        blocks = _checkpointed(model, blocks)
    for block in reversed(blocks):  # inner ones first
        if compiled:
            block.compile()
        keep = not _RELEASES[strategy] or (best and block is blocks[-1])
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if best:
        for before, block, after in zip(blocks, blocks[1:], [*blocks[2:], None], strict=False):
            block.set_modules_to_backward_prefetch([before])
            if after is not None:
                block.set_modules_to_forward_prefetch([after])
    return blocks


def reduce_dtype(precision: Precision) -> torch.dtype | None:
    """The same gradients on the wire as fullshard's, where FSDP2 has them."""
    if torch.int8 in (precision.gather, precision.wire):
        raise OptionError("FSDP2 sends no 8-bit blocks", "Choose another precision, or fullshard alone.")
    return precision.wire or precision.compute


def materialize(model: nn.Module, what: Subject, device: torch.device) -> None:
    """Values for a model that was built and sharded on meta."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return
    if what.initialize is None:
        raise OptionError(f"FSDP2 cannot fill {what.name}, which is on meta", "Build it on a device.")
    model.to_empty(device=device)
    with torch.no_grad():
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is None:
                what.initialize(module)  # buffers alone
        for name, parameter in model.named_parameters():
            shard: Any = parameter
            fill(name, shard.to_local())


def _checkpointed(model: nn.Module, blocks: list[Any]) -> list[Any]:
    chosen = {id(block) for block in blocks}
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in chosen)
    return [m for m in model.modules() if id(getattr(m, "_checkpoint_wrapped_module", None)) in chosen]
