"""What `plan="auto"` may be given: the batch, the optimizer, the machine, and what may change numbers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fullshard.byte_sizes import parse_size
from fullshard.errors import OptionError
from fullshard.keywords import checked_keywords
from fullshard.offload import folder
from fullshard.planning.choosing import WIRES
from fullshard.planning.needs import OPTIMIZERS

_OTHER_NAMES = {
    **dict.fromkeys(("inputs", "example", "example_inputs", "sample"), "Write batch=EXAMPLE."),
    **dict.fromkeys(("gpu", "card", "device"), "Write machine='h100', or leave it out."),
    **dict.fromkeys(("gpu_memory", "memory_bytes", "device_memory"), "Write memory='80GiB'."),
    **dict.fromkeys(("seq_len", "sequence_length", "max_tokens"), "Write tokens=N, or batch=EXAMPLE."),
}


@checked_keywords(_OTHER_NAMES)
@dataclass(frozen=True)
class Planning:
    """A request to choose the settings of `fs.shard`: `fs.shard(model, plan=fs.Planning(batch=batch))`.

    batch: an example of what a rank's forward gets: a tensor, a tuple, or a dict of keyword arguments. Only
        shapes and dtypes count. Without it, a model of transformers is planned with one sequence of its
        context (`tokens` at most); of any other, activations are not known: two fifths of the memory are left
        for them, and computing is estimated from the shapes of its parameters.
    tokens: per rank and step, where there is no `batch`.
    optimizer: 'adamw', 'fused-adamw', 'adam', 'rmsprop', 'adagrad', 'sgd-momentum' or 'sgd'.
    memory: of each device, such as '80GiB'; None is what is free now on the rank that has least.
    host: host memory of each node that values may take; None is what is free there; 0 for none.
    disk: a folder on each node's own disk for what exceeds host memory; None for none.
    machine: a card by name, such as 'h100'; None is this machine, measured once and remembered.
    allow: what changes numbers and may be chosen: 'int8-across', 'int8'.
    """

    batch: Any = None
    tokens: int = 4096
    optimizer: str = "adamw"
    memory: int | str | None = None
    host: int | str | None = None
    disk: str | os.PathLike[str] | None = None
    machine: str | None = None
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("memory", "host"):
            value = getattr(self, name)
            remedy = "Give bytes or a size such as '80GiB'."
            if isinstance(value, str):
                object.__setattr__(self, name, parse_size(value, f"Planning.{name}", remedy))
            elif value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise OptionError(f"Planning.{name} is {value!r}", remedy)
        if self.disk is not None:
            object.__setattr__(self, "disk", folder("Planning.disk", self.disk))
        if not isinstance(self.tokens, int) or isinstance(self.tokens, bool) or self.tokens < 1:
            raise OptionError(f"Planning.tokens is {self.tokens!r}", "Give a number of tokens.")
        if self.optimizer not in OPTIMIZERS:
            known = ", ".join(OPTIMIZERS)
            raise OptionError(f"Planning.optimizer is {self.optimizer!r}", f"Choose one of {known}.")
        allowed = (self.allow,) if isinstance(self.allow, str) else tuple(self.allow)
        object.__setattr__(self, "allow", allowed)
        for wire in allowed:
            if wire not in WIRES:
                raise OptionError(f"Planning.allow has {wire!r}", f"Choose from {', '.join(WIRES)}.")

    def free_on_disk(self) -> int:
        """Bytes, where `disk` is or would be made; 0 without one."""
        if self.disk is None:
            return 0
        folder = Path(self.disk).absolute()
        there = next(place for place in (folder, *folder.parents) if place.is_dir())
        return shutil.disk_usage(there).free


def request_of(value: Any) -> Planning:
    """'auto', a mapping, or a Planning."""
    if isinstance(value, Planning):
        return value
    if isinstance(value, Mapping):
        known = [field.name for field in fields(Planning)]
        for name in value:
            if name not in known:
                raise OptionError(
                    f"plan has {name!r}", f"Known are {', '.join(known)}; a record has settings."
                )
        return Planning(**value)
    return Planning()
