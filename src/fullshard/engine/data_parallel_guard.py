"""Torch's own data parallelism around a sharded module: kept away from the shards, or refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

from fullshard.errors import ModelError


def keep_from_replicate(module: nn.Module) -> None:
    """torch's `replicate` of a model around leaves this module out; it would send shards about."""
    module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())["fully_shard"] = RegistryItem()


def refuse_ddp_around(parameters: Iterable[nn.Parameter]) -> None:
    """DistributedDataParallel around a sharded module has sent the first rank's shards to all ranks."""
    around = nn.parallel.DistributedDataParallel._active_ddp_module
    if around is None:
        return
    sent = {id(p) for p in around._module_parameters}
    if any(id(p) in sent for p in parameters):
        raise ModelError(
            "DistributedDataParallel lies around sharded parameters: it has made all ranks' shards the same",
            "Shard the model without it; or build it anew, and before wrapping it name these parameters in "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names).",
        )
