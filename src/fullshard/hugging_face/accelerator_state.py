"""accelerate's state when FSDP is requested: versions are checked, and CPU ranks take part."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from fullshard import extras
from fullshard.comm import control
from fullshard.environment import launch
from fullshard.errors import OptionError, report_errors_as
from fullshard.hugging_face import request
from fullshard.hugging_face.patching import PATCHES


def apply(module: ModuleType) -> None:
    """Patch accelerate.state, once it has been imported."""
    PATCHES.replace(module.AcceleratorState, "__init__", _state_init)


def _state_init(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        plugin = kwargs.get("fsdp_plugin")
        fresh, launched = not type(self)._shared_state, launch().ranks
        if plugin is None:
            original(self, *args, **kwargs)
            if fresh and launched > 1 and self.distributed_type == "NO":
                raise _copies(launched)
            return
        for library in ("accelerate", "transformers", "trl"):
            if library in sys.modules:
                extras.refuse_untried(library)
        state = sys.modules[type(self).__module__]
        if launched > 1 and not state.PartialState._shared_state and not torch.accelerator.is_available():
            kwargs["cpu"] = True  # otherwise each rank would be a world of its own
        given = plugin.mixed_precision_policy
        original(self, *args, **kwargs)
        vars(plugin).setdefault(
            request.POLICY_FILLED_IN, plugin.mixed_precision_policy if given is None else None
        )
        one_rank = launched == 1 and self.distributed_type == "NO" and self.device.type in ("cpu", "cuda")
        if fresh and (one_rank or self.distributed_type in ("MULTI_CPU", "FSDP")):
            # accelerate considers neither CPU ranks nor a process without a launcher for FSDP, and would
            # silently run DDP, or nothing. They are FSDP already where only the state of the accelerator has
            # been reset.
            control.start()
            self.distributed_type = state.DistributedType.FSDP
            self.fsdp_plugin = plugin
            state.PartialState._shared_state["distributed_type"] = self.distributed_type
        if launched > 1 and self.distributed_type == "NO":
            raise OptionError(
                f"FSDP is requested on {launched} ranks, and accelerate took each for a world of its own",
                "On ranks without a GPU give TrainingArguments(use_cpu=True) or Accelerator(cpu=True).",
            )

    return __init__


def _copies(launched: int) -> OptionError:
    report_errors_as(launch().rank)
    return OptionError(
        f"{launched} ranks were started, FSDP is not requested, and without a GPU accelerate takes each for "
        "a world of its own: all would train the same model on the same data and write into the same folder",
        "Request FSDP (--fsdp, TrainingArguments(fsdp=True), fsdp_plugin=) to shard over the ranks; or give "
        "--use_cpu, Accelerator(cpu=True) for data parallelism; or start one process.",
    )
