"""The strategies for those who import `lightning`."""

from __future__ import annotations

from lightning.fabric.plugins.io import torch_io
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy as _FabricBase
from lightning.pytorch.core import saving
from lightning.pytorch.strategies import DDPStrategy as _TrainerBase
from lightning.pytorch.strategies import StrategyRegistry

from fullshard.lightning.fabric_side import FabricSide
from fullshard.lightning.folders import teach
from fullshard.lightning.trainer_side import TrainerSide


class FullShardStrategy(TrainerSide, _TrainerBase):
    """For the Trainer: `Trainer(strategy=FullShardStrategy(), devices=8)`. Options are those of fs.shard."""


class FullShardFabricStrategy(FabricSide, _FabricBase):
    """For Fabric: `Fabric(strategy=FullShardFabricStrategy(), devices=8)`. Options are those of fs.shard."""


# By name, too: Trainer(strategy="fullshard") after `import fullshard.lightning`.
for _registry, _kind in ((StrategyRegistry, FullShardStrategy), (STRATEGY_REGISTRY, FullShardFabricStrategy)):
    _registry.register(
        "fullshard", _kind, description="fully sharded data parallel by fullshard", override=True
    )
teach(saving, torch_io)
