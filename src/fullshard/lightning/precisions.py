"""Lightning's `precision=` as an fs.Precision.

32-true, 64-true     as the module is
bf16-true, 16-true   Lightning casts the module; sums of gradients are fp32
bf16-mixed, 16-mixed torch.autocast, as in Lightning; parameters are gathered in the narrow dtype, and are
                     fp32 at rest, as are sums of gradients. `FullShardStrategy(precision="fp32")` gathers
                     them in fp32: Lightning's single-device arithmetic, and twice the bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from fullshard import precision as _precision
from fullshard.errors import NotSupported
from fullshard.precision import Precision

_AS_IT_IS = ("32-true", "64-true", "bf16-true", "16-true")
_MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
# Lightning's others replace layers or weights by classes of their own, or belong to another engine.
_KINDS = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")


def engine_precision(plugin: Any, requested: str | Precision | None) -> Precision:
    """How the engine computes under a precision plugin of Lightning's. `requested` has precedence."""
    name = getattr(plugin, "precision", None)
    packages = ("lightning", "pytorch_lightning", "lightning_fabric")
    kind = next((c for c in type(plugin).__mro__ if c.__module__.split(".")[0] in packages), type(plugin))
    if kind.__name__ not in _KINDS or not (name in _AS_IT_IS or name in _MIXED):
        raise NotSupported(
            f"precision={name!r} ({type(plugin).__name__})",
            f"Choose one of {', '.join((*_AS_IT_IS, *_MIXED))}.",
        )
    if requested is not None:
        return _precision.parse(requested)
    return Precision(compute=_MIXED.get(str(name)))


def is_mixed(plugin: Any) -> bool:
    """Lightning runs steps under torch.autocast."""
    return getattr(plugin, "precision", None) in _MIXED
