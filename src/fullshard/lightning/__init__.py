"""fullshard for Lightning, with the Trainer and with Fabric.

from fullshard.lightning import FullShardStrategy, FullShardFabricStrategy

trainer = lightning.Trainer(strategy=FullShardStrategy(), accelerator="cpu", devices=2)
fabric = lightning.Fabric(strategy=FullShardFabricStrategy(), accelerator="cpu", devices=2)

Two classes, because Lightning has two base classes with methods of the same names and different arguments.
Scripts that import `pytorch_lightning` take both from `fullshard.lightning.pytorch_lightning`; where
`lightning` itself is not installed, these are the ones here.

On import, Lightning's readers of checkpoint files learn to read our folders; `turn_off()` restores them.
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
from fullshard.lightning.patching import turn_off, turn_on

__all__ = [
    "FullShardFabricStrategy",
    "FullShardStrategy",
    "consolidate",
    "read_checkpoint",
    "turn_off",
    "turn_on",
]
