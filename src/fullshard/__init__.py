"""fullshard: train PyTorch models that are too large for one device.

import fullshard as fs
model = fs.shard(model)
"""

from typing import TYPE_CHECKING

from fullshard import leaving as _leaving  # noqa: F401  it registers itself with the interpreter
from fullshard.version import VERSION as __version__

# Public names are imported when they are first used: what needs no torch, such as `fullshard --help`, does
# not wait for it. Type checkers and editors read the first branch.
if TYPE_CHECKING:
    from fullshard.api import accumulate, even_batches, full, inference, penalty, plan, shard
    from fullshard.checkpoint.load import load
    from fullshard.checkpoint.newest import latest
    from fullshard.checkpoint.save import save
    from fullshard.data import Batches
    from fullshard.doctor.check import check
    from fullshard.errors import FullshardError
    from fullshard.guard import Guard
    from fullshard.offload import Offload
    from fullshard.planning.request import Planning
    from fullshard.precision import Precision
    from fullshard.stopping import stop_requested
else:
    from fullshard import lazy_names

    lazy_names.install(
        __name__,
        {
            "Batches": "fullshard.data",
            "FullshardError": "fullshard.errors",
            "Guard": "fullshard.guard",
            "Offload": "fullshard.offload",
            "Planning": "fullshard.planning.request",
            "Precision": "fullshard.precision",
            "accumulate": "fullshard.api",
            "check": "fullshard.doctor.check",
            "even_batches": "fullshard.api",
            "full": "fullshard.api",
            "inference": "fullshard.api",
            "latest": "fullshard.checkpoint.newest",
            "load": "fullshard.checkpoint.load",
            "penalty": "fullshard.api",
            "plan": "fullshard.api",
            "save": "fullshard.checkpoint.save",
            "shard": "fullshard.api",
            "stop_requested": "fullshard.stopping",
        },
    )

__all__ = [
    "Batches",
    "FullshardError",
    "Guard",
    "Offload",
    "Planning",
    "Precision",
    "__version__",
    "accumulate",
    "check",
    "even_batches",
    "full",
    "inference",
    "latest",
    "load",
    "penalty",
    "plan",
    "save",
    "shard",
    "stop_requested",
]
