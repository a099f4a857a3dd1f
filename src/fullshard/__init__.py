"""fullshard: train PyTorch models that are too large for one device.

import fullshard as fs
model = fs.shard(model)
"""

from fullshard.engine import accumulate, even_batches, full, plan, shard
from fullshard.errors import FullshardError
from fullshard.precision import Precision

__all__ = ["FullshardError", "Precision", "accumulate", "even_batches", "full", "plan", "shard"]
__version__ = "0.1.0"
