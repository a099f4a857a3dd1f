"""The same strategies for `import pytorch_lightning`, whose classes are others than those of `lightning`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fullshard import extras
from fullshard.lightning import patching
from fullshard.lightning.fabric_strategy import ShardedFabric
from fullshard.lightning.trainer_strategy import ShardedTrainer

extras.need("pytorch_lightning", "lightning")
extras.refuse_untried("pytorch-lightning")

if TYPE_CHECKING:  # to mypy they are the same classes twice
    from lightning.fabric.plugins.io import torch_io
    from lightning.fabric.strategies.ddp import DDPStrategy as _FabricBase
    from lightning.pytorch.core import saving
    from lightning.pytorch.strategies import DDPStrategy as _TrainerBase
else:
    from lightning_fabric.plugins.io import torch_io
    from lightning_fabric.strategies.ddp import DDPStrategy as _FabricBase
    from pytorch_lightning.core import saving
    from pytorch_lightning.strategies import DDPStrategy as _TrainerBase


class FullShardStrategy(ShardedTrainer, _TrainerBase):
    """For pytorch_lightning's Trainer. Options are those of fs.shard."""


class FullShardFabricStrategy(ShardedFabric, _FabricBase):
    """For lightning_fabric's Fabric. Options are those of fs.shard."""


patching.add((saving, torch_io))
