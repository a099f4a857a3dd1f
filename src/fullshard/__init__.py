"""fullshard: train PyTorch models that are too large for one device.

import fullshard as fs
model = fs.shard(model)
"""

from fullshard import model_libraries
from fullshard.api import accumulate, even_batches, full, inference, plan, shard
from fullshard.checkpoint.commit import latest
from fullshard.checkpoint.load import load
from fullshard.checkpoint.save import save
from fullshard.data import Batches
from fullshard.errors import FullshardError
from fullshard.precision import Precision
from fullshard.version import VERSION as __version__

__all__ = [
    "Batches",
    "FullshardError",
    "Precision",
    "__version__",
    "accumulate",
    "even_batches",
    "full",
    "inference",
    "latest",
    "load",
    "plan",
    "save",
    "shard",
]

model_libraries.register()
