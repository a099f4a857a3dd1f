"""The same strategies for those who import `pytorch_lightning`, whose classes are its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fullshard import extras
from fullshard.lightning.fabric_side import FabricSide
from fullshard.lightning.folders import teach
from fullshard.lightning.trainer_side import TrainerSide

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


class FullShardStrategy(TrainerSide, _TrainerBase):
    """For pytorch_lightning's Trainer. Options are those of fs.shard."""


class FullShardFabricStrategy(FabricSide, _FabricBase):
    """For lightning_fabric's Fabric. Options are those of fs.shard."""


teach(saving, torch_io)
