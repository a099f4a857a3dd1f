"""fullshard for Lightning, with the Trainer and with Fabric.

from fullshard.lightning import FullShardStrategy, FullShardFabricStrategy

trainer = lightning.Trainer(strategy=FullShardStrategy(), accelerator="cpu", devices=2)
fabric = lightning.Fabric(strategy=FullShardFabricStrategy(), accelerator="cpu", devices=2)

Two classes, because Lightning has two bases with methods of the same names and other arguments. Those who
import `pytorch_lightning` take both from `fullshard.lightning.pytorch_lightning`; where `lightning` itself is
not installed, these are the ones here.
"""

from importlib.util import find_spec

from fullshard import extras

if find_spec("lightning") is not None or find_spec("pytorch_lightning") is None:
    extras.need("lightning", "lightning")
    extras.refuse_untried("lightning")
    from fullshard.lightning.strategies import FullShardFabricStrategy, FullShardStrategy
else:
    from fullshard.lightning.pytorch_lightning import (  # type: ignore[assignment]
        FullShardFabricStrategy,
        FullShardStrategy,
    )
from fullshard.lightning.consolidation import consolidate, read_checkpoint

__all__ = ["FullShardFabricStrategy", "FullShardStrategy", "consolidate", "read_checkpoint"]
