"""The strategies for `import lightning`."""

from __future__ import annotations

from lightning.fabric.plugins.io import torch_io
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy as _FabricBase
from lightning.pytorch.core import saving
from lightning.pytorch.strategies import DDPStrategy as _TrainerBase
from lightning.pytorch.strategies import StrategyRegistry

from fullshard.lightning import patching
from fullshard.lightning.fabric_strategy import ShardedFabric
from fullshard.lightning.trainer_strategy import ShardedTrainer


class FullShardStrategy(ShardedTrainer, _TrainerBase):
    """For the Trainer: `Trainer(strategy=FullShardStrategy(), devices=8)`. Options are those of fs.shard."""


class FullShardFabricStrategy(ShardedFabric, _FabricBase):
    """For Fabric: `Fabric(strategy=FullShardFabricStrategy(), devices=8)`. Options are those of fs.shard."""


patching.add(
    (saving, torch_io), ((StrategyRegistry, FullShardStrategy), (STRATEGY_REGISTRY, FullShardFabricStrategy))
)
