"""FSDPModule: what torch's `fully_shard` makes of a module, with this engine behind its methods.

| method | what it does here |
| --- | --- |
| unshard | between steps: the module's own parameters are unsharded until reshard or the next forward; inside a pass, or with async_op until its handle is waited for: nothing, the engine gathers by itself |
| reshard | ends unshard; releases a unit that is kept for backward |
| set_reshard_after_forward | works, for each module |
| set_requires_gradient_sync, set_requires_all_reduce | on a 2-D mesh the sum over replicas is postponed while it is False for all modules; on a 1-D mesh gradients are reduced every time, which gives the same sums for less memory |
| set_gradient_divide_factor, set_reduce_scatter_divide_factor, set_reduce_scatter_unused_params | work, for each module |
| load_state_dict | works; with assign=True values of the same dtype are copied into the shards |
| reset_iter_state | works; the next forward would recover by itself |
| set_modules_to_forward_prefetch, set_modules_to_backward_prefetch | checked, then without effect: the engine learns the order and prefetches along it |
| set_reshard_after_backward, set_is_last_backward, set_unshard_in_backward, set_post_optim_event, set_force_sum_reduction_for_comms, set_reduce_scatter_max_input_buffers, set_separate_reduce_scatter_group | no effect: results are the same, and the engine decides |
| set_all_reduce_hook, set_custom_all_gather, set_custom_reduce_scatter, set_symm_mem_for_comm, set_allocate_memory_from_process_group_for_comm(True) | NotSupported |
"""  # noqa: E501  a table

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fullshard.engine.runtime import Runtime
from fullshard.engine.unit import LiveUnit
from fullshard.errors import NotSupported, OptionError
from fullshard.torch_fsdp.deferred import copied, requests_in
from fullshard.torch_fsdp.module_requests import ModuleRequest, module_request


class UnshardHandle:
    """What `unshard(async_op=True)` returns."""

    def __init__(self, request: ModuleRequest | None = None) -> None:
        self._request = request

    def wait(self) -> None:
        """The module's parameters are unsharded when this returns."""
        request, self._request = self._request, None
        if request is not None:
            _unshard(request)


class FSDPModule:
    """A module to which `fully_shard` was applied. It keeps its class: this one is put before it."""

    _plain_class: type[nn.Module]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A new object of this class, such as a slice of a Sequential, is a plain module."""
        return cls._plain_class(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copied(module_request(self).module, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotSupported(
            "a module under fully_shard cannot be pickled: every rank holds a part",
            "Save its state dict: fs.save, torch.distributed.checkpoint, or inside `with fs.full(model):`.",
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Copies values into the shards. `assign` of values of another dtype is refused.

        Arguments are passed on as given: the module's class may have a load_state_dict of its own.
        """
        module = module_request(self).module
        if kwargs.get("assign", args[1] if len(args) > 1 else False):
            _refuse_other_dtypes(module, state_dict)
            args, kwargs = args[:1], {k: v for k, v in kwargs.items() if k != "assign"}
        return self._plain_class.load_state_dict(module, state_dict, *args, **kwargs)

    def _get_fsdp_state(self) -> ModuleRequest:
        return module_request(self)

    # ---- full values

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Unsharded values in the module's own parameters, for reading. All ranks must call it."""
        request = module_request(self)
        request.begin()
        if async_op:
            return UnshardHandle(request)
        _unshard(request)
        return None

    def reshard(self) -> None:
        """Only this rank's elements in the module's own parameters again."""
        request = module_request(self)
        request.begin()
        runtime = request.runtime
        if runtime is not None:
            for unit in runtime.units_holding(request.own_parameters()):
                _Unsharded.of(runtime).close(unit)
                if not runtime.in_pass:
                    unit.release()

    def reset_iter_state(self) -> None:
        """Drops what a forward or backward that raised has left."""
        request = module_request(self)
        request.begin()
        if request.runtime is not None:
            request.runtime.abandon()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether full values are released after forward and gathered again in backward."""
        if not isinstance(reshard_after_forward, bool):
            raise OptionError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}",
                "Give True or False.",
            )
        for request in _requests(self, recurse):
            request.reshards = reshard_after_forward
            request.update_policy()

    # ---- gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False for all micro-batches but the last."""
        for request in _requests(self, recurse):
            request.syncs = request.sums_replicas = requires_gradient_sync
        module_request(self).update_reduction()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """On a 2-D mesh: False postpones the sum over replicas to a later micro-batch."""
        for request in _requests(self, recurse):
            request.sums_replicas = requires_all_reduce
        module_request(self).update_reduction()

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Sums of this module's gradients are divided by `factor` instead of the number of ranks."""
        request = module_request(self)
        request.divisor = float(factor)
        request.update_policy()

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of set_gradient_divide_factor."""
        self.set_gradient_divide_factor(factor)

    # ---- without effect here

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Only checks its argument: the engine gathers in the order of the first pass."""
        _check_modules(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Only checks its argument: backward follows the order of the first pass."""
        _check_modules(modules)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """No effect: full values are released when backward ends, and gathered again."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """No effect: every backward is completed when it ends."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """No effect: the engine knows which units backward does not need (embeddings)."""

    def set_post_optim_event(self, event: Any) -> None:
        """No effect: gathers wait for the stream that the optimizer ran on."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """No effect: sums are all that is sent here."""

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Zeros, not None, for parameters that no rank used, in units that were used.

        Ranks may use different parameters in any case.
        """
        for request in _requests(self, recurse):
            request.zero_unused = reduce_scatter_unused_params
            request.update_policy()

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Only checks its argument: a few small reduces, or one large one, are in flight at a time."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise OptionError(f"max_input_buffers is {max_input_buffers}", "Give a positive int.")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """No effect: gathers and reduces always have a group each."""

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """No effect: gathers are always issued ahead."""

    # ---- not supported

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> None:
        raise _no("set_all_reduce_hook", "Change p.grad between backward and the optimizer's step.")

    def set_custom_all_gather(self, comm: Any) -> None:
        raise _no("set_custom_all_gather", "Leave it out; fs.Precision(gather=torch.int8) sends less.")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        raise _no("set_custom_reduce_scatter", "Leave it out; fs.Precision(wire=...) changes what is sent.")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        raise _no("set_symm_mem_for_comm", "Leave it out.")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        if enable:
            raise _no("set_allocate_memory_from_process_group_for_comm", "Leave it out.")


def _refuse_other_dtypes(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    both = *module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)
    own = {name: tensor.dtype for name, tensor in both}
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor) and value.dtype != own.get(name, value.dtype):
            raise NotSupported(
                f"load_state_dict(assign=True) of {name!r} in {value.dtype} over {own[name]}",
                "Use assign=False, which casts, or give the model that dtype before fully_shard.",
            )


def _no(method: str, remedy: str) -> NotSupported:
    return NotSupported(f"FSDPModule.{method}: this engine has its own communication", remedy)


def _requests(module: Any, recurse: bool) -> list[ModuleRequest]:
    """Those that a setter is for. It may be called before the outer modules have requests: nothing begins."""
    request = module_request(module)
    return requests_in(request.module, ModuleRequest) if recurse else [request]


def _check_modules(modules: Sequence[Any]) -> None:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise OptionError(f"expects FSDPModules but got {type(module)}", "Call fully_shard on it first.")


class _Unsharded:
    """The units of one engine that `unshard` has opened."""

    def __init__(self) -> None:
        self._open: dict[LiveUnit, AbstractContextManager[None]] = {}
        self._watches: list[RemovableHandle] = []

    @classmethod
    def of(cls, runtime: Runtime) -> _Unsharded:
        return _unsharded.setdefault(runtime, cls())

    def open(self, runtime: Runtime, unit: LiveUnit) -> None:
        if unit in self._open:
            return
        context = runtime.opened([unit], writeback=False)
        context.__enter__()
        self._open[unit] = context
        if not self._watches:
            # A forward gathers by itself, and trains; one on values opened for reading could not.
            self._watches = [
                request.module.register_forward_pre_hook(self._before_forward, prepend=True)
                for request in requests_in(runtime.model, ModuleRequest)
            ]

    def _before_forward(self, *_: Any) -> None:
        for unit in list(self._open):
            self.close(unit)

    def close(self, unit: LiveUnit) -> None:
        context = self._open.pop(unit, None)
        if context is not None:
            context.__exit__(None, None, None)
        if not self._open:
            for watch in self._watches:
                watch.remove()
            self._watches.clear()


_unsharded: weakref.WeakKeyDictionary[Runtime, _Unsharded] = weakref.WeakKeyDictionary()


def _unshard(request: ModuleRequest) -> None:
    runtime = request.runtime
    if runtime is None or runtime.in_pass:
        return
    for unit in runtime.units_holding(request.own_parameters()):
        if not unit.is_unsharded:
            with torch.no_grad():
                _Unsharded.of(runtime).open(runtime, unit)
