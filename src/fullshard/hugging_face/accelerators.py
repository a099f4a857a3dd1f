"""accelerate's FSDP on our engine: prepare, accumulation, clipping, state dicts.

Every replacement first checks whether FSDP was requested, and otherwise calls the original.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from types import ModuleType
from typing import Any

import torch

from fullshard.api import accumulate
from fullshard.engine.runtime import is_sharded
from fullshard.errors import NotSupported
from fullshard.hugging_face import checkpoints, request
from fullshard.hugging_face.patching import PATCHES
from fullshard.hugging_face.preparing import shard_model, uses_fsdp
from fullshard.hugging_face.unsharded_state import unsharded_state

_AS_VERSION_1 = "_fullshard_as_version_1"
_NO_DEVICE = "There are currently no available devices"


def apply(module: ModuleType) -> None:
    """Patch accelerate.accelerator, once it has been imported."""
    PATCHES.replace(module.FullyShardedDataParallelPlugin, "__post_init__", _plugin_post_init)
    for name, make in _METHODS.items():
        PATCHES.replace(module.Accelerator, name, make)
    for name, make in checkpoints.FUNCTIONS.items():
        PATCHES.replace(sys.modules["accelerate.utils.fsdp_utils"], name, make)


def _plugin_post_init(original: Any) -> Any:
    def __post_init__(self: Any) -> None:
        # For a copy of a plugin this runs again: the values that the user gave first count.
        vars(self).setdefault(
            request.GIVEN, {field.name: getattr(self, field.name) for field in fields(self)}
        )
        try:
            original(self)
        except RuntimeError as error:
            # sync_module_states requires a GPU for a function that is not needed here, because fs.shard
            # broadcasts the first rank's values. It is the last thing done for a plugin of version 1.
            if not str(error).startswith(_NO_DEVICE):
                raise

    return __post_init__


def _accelerator_init(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not uses_fsdp(self):
            return
        request.check(self)
        if self.mixed_precision == "fp16":
            # torch's own scaler is correct on our gradients; accelerate would choose one made for other
            # engines, and on the CPU none.
            arguments = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
            self.scaler = torch.amp.GradScaler(self.device.type, **arguments)
            self.native_amp = True

    return __init__


def _is_fsdp2(_: Any) -> property:
    return property(lambda self: bool(self.state.is_fsdp2) and _AS_VERSION_1 not in vars(self))


def _as_version_1(original: Any) -> Any:
    """A method of Accelerator that takes the code path of FSDP version 1, whichever version is requested.

    On that path `prepare` takes models and optimizers one by one, in any number. The path of version 2 looks
    up an optimizer's parameters by address, which our empty shards share; and its `load_state` fails on a
    scaler that has been used.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not uses_fsdp(self):
            return original(self, *args, **kwargs)
        vars(self)[_AS_VERSION_1] = True
        try:
            return original(self, *args, **kwargs)
        finally:
            del vars(self)[_AS_VERSION_1]

    return method


def _prepare_model(original: Any) -> Any:
    def prepare_model(
        self: Any, model: Any, device_placement: Any = None, evaluation_mode: bool = False
    ) -> Any:
        if not uses_fsdp(self) or (evaluation_mode and not is_sharded(model)):
            return original(self, model, device_placement, evaluation_mode)
        shard_model(self, model)
        if not any(known is model for known in self._models):
            self._models.append(model)
        return model

    return prepare_model


def _no_sync(original: Any) -> Any:
    def no_sync(self: Any, model: Any) -> Any:
        return accumulate(model) if is_sharded(model) else original(self, model)

    return no_sync


def _join_uneven_inputs(original: Any) -> Any:
    def join_uneven_inputs(self: Any, joinables: Any, even_batches: bool | None = None) -> Any:
        if uses_fsdp(self) and not (self.even_batches if even_batches is None else even_batches):
            raise NotSupported(
                "join_uneven_inputs with even_batches=False: every rank must take part in every pass",
                "Leave even_batches at True.",
            )
        return original(self, joinables, even_batches)

    return join_uneven_inputs


def _clip_grad_norm(original: Any) -> Any:
    def clip_grad_norm_(self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        if not uses_fsdp(self):
            return original(self, parameters, max_norm, norm_type)
        self.unscale_gradients()
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    return clip_grad_norm_


def _clip_grad_value(original: Any) -> Any:
    def clip_grad_value_(self: Any, parameters: Any, clip_value: float) -> Any:
        if not uses_fsdp(self):
            return original(self, parameters, clip_value)
        self.unscale_gradients()
        return torch.nn.utils.clip_grad_value_(parameters, clip_value)

    return clip_grad_value_


def _get_state_dict(original: Any) -> Any:
    def get_state_dict(self: Any, model: Any, unwrap: bool = True) -> Any:
        if is_sharded(model):
            return unsharded_state(model, keep=self.is_main_process)
        if uses_fsdp(self):
            return model.state_dict()
        return original(self, model, unwrap)

    return get_state_dict


_METHODS = {
    "__init__": _accelerator_init,
    "is_fsdp2": _is_fsdp2,
    "prepare": _as_version_1,
    "load_state": _as_version_1,
    "prepare_model": _prepare_model,
    "no_sync": _no_sync,
    "join_uneven_inputs": _join_uneven_inputs,
    "clip_grad_norm_": _clip_grad_norm,
    "clip_grad_value_": _clip_grad_value,
    "get_state_dict": _get_state_dict,
}
