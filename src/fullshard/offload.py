"""Which values rest away from the compute device: the `offload` option."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from fullshard.byte_sizes import parse_size
from fullshard.errors import OptionError
from fullshard.keywords import checked_keywords

KINDS = ("compute", "master", "gradients", "state")
STEPS = ("device", "host")
_OTHER_NAMES = {
    **dict.fromkeys(("nvme_path", "path", "folder", "nvme"), "Write disk=FOLDER."),
    **dict.fromkeys(("cpu", "cpu_memory", "max_cpu_memory", "max_in_cpu"), "Write host='90GiB'."),
    **dict.fromkeys(("gpu", "gpu_memory", "memory", "ratio"), "Write device='22GiB'."),
    **dict.fromkeys(("pin_memory", "buffer_count", "fast_init"), "Leave it out: host memory is page-locked."),
    **dict.fromkeys(("buffer_size", "sub_group_size"), "Write chunk=ELEMENTS."),
    **dict.fromkeys(("pipeline_read", "pipeline_write", "pipeline"), "Leave it out: it is always the case."),
}
# By what other libraries write for the option, what to write here.
_OTHER_VALUES = {
    **dict.fromkeys(("cpu", "true", "ram", "params", "full"), "'host'"),
    **dict.fromkeys(("optim", "optimizer_state", "states"), "'optimizer'"),
    **dict.fromkeys(("none", "false", "gpu", "cuda", "device", "no", "off"), "None"),
    **dict.fromkeys(("disk", "nvme", "ssd"), "fs.Offload(disk=FOLDER)"),
}


@checked_keywords(_OTHER_NAMES)
@dataclass(frozen=True)
class Offload:
    """A budget for values at rest. They fill the device first, then the host, then the disk.

    device: bytes of values at rest that stay on the compute device of each rank ('22GiB'); 'auto' is what is
        free there, less what computing needs.
    host: bytes on each host, which its ranks share; None: no limit, 'auto': what is free there.
    disk: a folder for masters and optimizer state that exceed that. Beside the values at rest, each rank then
        has 32 buffers of a chunk in host memory, for what is read and written.
    kinds: what may rest elsewhere: 'compute' (the shards that gathers send), 'master' (those that the
        optimizer updates, where parameters are cast), 'gradients' and 'state' (what the optimizer keeps).
    chunk: elements of each kind that an optimizer's step works on at once; None: 4 Mi, or more, by the model.
    step: where the optimizer's step runs. 'device': what it needs is brought there, and the bits are those of
        a run without offload. 'host': what rests on the host is updated there, for hosts whose memory is
        faster than their link to the device; the results agree to rounding.
    overlap: let `optimizer.step()` return before what rests on the host is updated. The update goes on behind
        the next forward, each unit of which waits for its own values, so the bits are the same. Everything
        that reads parameters or states through the model, a state dict or fullshard waits; for code that
        kept a reference to a parameter or to an optimizer's state, call torch.cuda.synchronize() first.
    slabs: with overlap, memory of the compute device for the chunks of a step ('6GiB'); None: as little as a
        step needs. What is fetched and stored goes on beside backward, too, as far as slabs hold it: the link
        is used all the time with as many bytes as it moves in a backward.
    one_backward: one rank trains, and each step has one backward. Its bf16 gradients are then not sums of
        anything, and rest as they were computed: 2 bytes per parameter instead of 4, the same bits. A second
        backward that adds to them is an error, and so is a write that bf16 cannot hold.
    split_masters: fp32 masters of bf16 values rest on the host as 17 bits per element, which restore them
        from the bf16 shards that gathers send: with Adam a step moves about 10 bytes per parameter each way,
        not 12, and 2 bytes less rest there. The bits are the same. A parameter at rest is then a tensor
        without memory of its own: reading it takes longer, its `numpy()` is a copy, and what needs its
        memory is an error.
    """

    device: int | str = 0
    host: int | str | None = None
    disk: str | os.PathLike[str] | None = None
    kinds: tuple[str, ...] = KINDS
    chunk: int | None = None
    step: str = "device"
    overlap: bool = False
    slabs: int | str | None = None
    one_backward: bool = False
    split_masters: bool = False

    def __post_init__(self) -> None:
        for name in ("device", "host"):
            value = getattr(self, name)
            if not (value == "auto" or (name == "host" and value is None)):
                object.__setattr__(self, name, _bytes(name, value))
        if self.slabs is not None:
            object.__setattr__(self, "slabs", _bytes("slabs", self.slabs))
        if self.slabs is not None and not self.overlap:
            raise OptionError(
                f"Offload.slabs is {self.slabs}, and a step without overlap leaves nothing to backward",
                "Give overlap=True, or leave out slabs.",
            )
        if self.disk is not None:
            object.__setattr__(self, "disk", folder("Offload.disk", self.disk))
        if not isinstance(self.kinds, tuple) or not self.kinds or any(k not in KINDS for k in self.kinds):
            raise OptionError(f"Offload.kinds is {self.kinds!r}", f"Give a tuple of {', '.join(KINDS)}.")
        chunk = 1 if self.chunk is None else self.chunk
        if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
            raise OptionError(f"Offload.chunk is {self.chunk!r}", "Give a number of elements.")
        if self.step not in STEPS:
            raise OptionError(f"Offload.step is {self.step!r}", f"Give one of {', '.join(map(repr, STEPS))}.")
        for name in ("overlap", "one_backward", "split_masters"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"Offload.{name} is {getattr(self, name)!r}", "Give True or False.")
        if self.overlap and self.step == "host":
            raise OptionError(
                "Offload.overlap is True and Offload.step is 'host'",
                "A step on the host is over when it returns: leave out one of them.",
            )

    @property
    def slab_limit(self) -> int | None:
        return None if self.slabs is None else int(self.slabs)


def folder(option: str, value: Any) -> str:
    """The path that an option is given, with the user's home folder for '~'."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise OptionError(f"{option} is {value!r}", "Give the path of a folder.")
    return os.path.expanduser(path)


def _bytes(name: str, value: Any) -> int:
    remedy = "Give bytes, or a size such as '22GiB'" + (", or 'auto'." if name != "slabs" else ".")
    if isinstance(value, str) and value.lower() in _OTHER_VALUES:
        remedy = f"It is a budget: write fs.shard(offload={_OTHER_VALUES[value.lower()]}), or give a size."
    if isinstance(value, str):
        value = parse_size(value, f"Offload.{name}", remedy)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise OptionError(f"Offload.{name} is {value!r}", remedy)
    return value


PRESETS = {
    "host": Offload(),
    "optimizer": Offload(kinds=("master", "state")),
    "auto": Offload(device="auto", host="auto"),
}


def parse(value: Any) -> Offload | None:
    if value is None or isinstance(value, Offload):
        return value
    if isinstance(value, str) and value in PRESETS:
        return PRESETS[value]
    known = ", ".join(map(repr, PRESETS))
    near = _OTHER_VALUES.get(str(value).lower())
    meant = "" if near is None else f"Did you mean {near}? "
    raise OptionError(f"offload is {value!r}", f"{meant}Give None, one of {known}, or an fs.Offload.")
