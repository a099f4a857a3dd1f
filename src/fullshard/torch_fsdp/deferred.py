"""Sharding that waits for the first use of a model: what both of torch's signatures are built on.

`fully_shard(block)` and `FSDP(block)` come before the call for the model, and none of these calls knows
whether another follows for a module further out. torch shards each block at once and finds the root when the
model first runs. Here that would make every block an engine with groups of its own. Since parameters keep
their identity, nothing is lost by waiting: a call leaves a Request on its module, and the outermost module
with one becomes one engine, with the requests inside it as units, when the first of them is used (forward,
parameters, state dicts, ...). Until then the model can be moved, cast and initialised.

Sharding at once where a policy is given was considered: it would free memory a few lines earlier, and break
`FSDP(model, auto_wrap_policy=...).to(device)` and a wrapper around the result.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import api
from fullshard.comm import control
from fullshard.engine import transforms
from fullshard.engine.data_parallel_guard import keep_from_replicate
from fullshard.engine.runtime import DEFERRED
from fullshard.errors import NotSupported, StateError
from fullshard.policy import Integration, UnitPolicy, ValueSource

R = TypeVar("R", bound="Request")
_deferred: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules whose request is in the first phase


class Phase(Enum):
    DEFERRED = "requested"
    BUILDING = "being sharded"
    BLANK = "sharded, its values still to be initialised"
    SHARDED = "sharded"


class RequestOptions(Protocol):
    """The arguments of one call."""

    @property
    def mesh(self) -> DeviceMesh | None: ...


@dataclass(frozen=True)
class Sharding:
    """The one call of `fs.shard` that all requests of a model become."""

    options: dict[str, Any]
    policy_of: Callable[[nn.Module], UnitPolicy]
    values: ValueSource | None = None  # of a meta-device model
    present: Callable[[torch.Tensor, Any, int], None] | None = None  # see `policy.Integration`


class Request:
    """What a module carries on which one of torch's signatures was called; see `engine.runtime.Deferred`."""

    options: RequestOptions

    def __init__(self, module: nn.Module) -> None:
        if not _begin_untraced:  # not at import: this brings in torch's compiler, which costs a second
            _begin_untraced.append(torch.compiler.disable(_begin))  # type: ignore[no-untyped-call]
        self._module = weakref.ref(module)
        self.phase = Phase.DEFERRED
        self.is_root: bool | None = None  # None until the model is used
        module.__dict__[DEFERRED] = self
        keep_from_replicate(module)
        _deferred.add(module)

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None  # it carries this request
        return module

    @property
    def target(self) -> nn.Module:
        """The module that is sharded: this one, or the one inside a wrapper."""
        return self.module

    @property
    def label(self) -> str:
        """The user's name for the class of the module."""
        raise NotImplementedError

    def combine(self, requests: Sequence[Self]) -> Sharding | None:
        """Of the root: one answer to all requests of the model; None if nothing is to be sharded."""
        raise NotImplementedError

    def settle(self, requests: Sequence[Self]) -> None:
        """What is left to do for this module when the model has been sharded."""
        raise NotImplementedError

    def set_phase(self, phase: Phase) -> None:
        self.phase = phase
        if phase is Phase.DEFERRED:
            _deferred.add(self.module)
        else:
            _deferred.discard(self.module)

    def begin(self, used: bool = True) -> nn.Module:
        """Shard the model unless that was done. All ranks must call it. Returns `target`."""
        if self.phase is Phase.DEFERRED:
            with outside_of_passes():
                build(outermost(self))
        return self.target

    def own_parameters(self) -> list[nn.Parameter]:
        """The parameters of this module and of no module inside it that has a request of its own."""
        inner = [r for r in requests_in(self.target, Request) if r is not self]
        theirs = {id(p) for request in inner for p in parameters_in(request.module)}
        return [p for p in parameters_in(self.target) if id(p) not in theirs]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.options.mesh)] = self.options.mesh  # its groups cannot be copied
        twin = memo[id(self)] = object.__new__(type(self))
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        twin._module = weakref.ref(memo[id(self.module)])  # being copied right now: it carries this request
        twin.set_phase(self.phase)
        return twin


@contextmanager
def outside_of_passes() -> Iterator[None]:
    """Shards are made here. The first use may be an evaluation, or run inside a transform of torch.func: its
    tensors would be, too, and could never train."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(transforms.left())
        yield


def request_of(module: nn.Module) -> Request | None:
    request: Request | None = module.__dict__.get(DEFERRED)
    return request


def requests_in(module: nn.Module, kind: type[R]) -> list[R]:
    """Of `module` and of everything inside it, outer ones first."""
    requests = (request_of(inside) for inside in module.modules())
    return [request for request in requests if isinstance(request, kind)]


def parameters_in(module: nn.Module) -> list[nn.Parameter]:
    """Without the module's own `parameters`, which would start to shard it."""
    return [p for _, p in nn.Module.named_parameters(module)]


def default_device() -> torch.device:
    """This rank's GPU; the host where there is none."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, torch.accelerator.current_device_index())


def is_on_meta(module: nn.Module) -> bool:
    return any(p.is_meta for p in parameters_in(module))


def outermost(request: R) -> R:
    """The deferred request around this one that no other is around."""
    module, size = request.module, 0
    for candidate in list(_deferred):
        inside = set(candidate.modules())
        if request.module in inside and len(inside) > size:
            module, size = candidate, len(inside)
    outer = request_of(module)
    if not isinstance(outer, type(request)):
        raise NotSupported(
            f"fully_shard and FullyShardedDataParallel in one model ({type(module).__name__})", "Use one."
        )
    return outer


def begin_on_call(request: Request) -> None:
    """At a call of the model. The first one of `torch.compile(model)` is traced, and this must not be."""
    (_begin_untraced[0] if torch.compiler.is_dynamo_compiling() else _begin)(request)


def _begin(request: Request) -> None:
    request.begin()


_begin_untraced: list[Callable[[Request], Any]] = []


def begin_unless_on_meta(request: Request) -> None:
    """For what a meta-device model can answer without values, such as its parameters."""
    if request.phase is Phase.DEFERRED and not is_on_meta(outermost(request).module):
        request.begin()


def build(root: Request, values: ValueSource | None = None) -> None:
    """Shard the model of the outermost request. If it raises, all requests are as they were."""
    requests = requests_in(root.module, type(root))
    refuse_sharded(requests[1:], root)
    if len(requests) != len(requests_in(root.module, Request)):
        raise NotSupported(f"fully_shard and FullyShardedDataParallel in one {root.label}", "Use one.")
    for request in requests:
        request.is_root = request is root
        request.set_phase(Phase.BUILDING)
    try:
        control.start()
        sharding = root.combine(requests)
        if sharding is not None:
            _shard(root.target, sharding, values or sharding.values)
    except BaseException:
        for request in requests:
            request.is_root = None
            request.set_phase(Phase.DEFERRED)
        raise
    for request in requests:
        request.set_phase(Phase.SHARDED)
    for request in requests:
        request.settle(requests)


def _shard(model: nn.Module, sharding: Sharding, values: ValueSource | None) -> None:
    integration = Integration(
        values=values, policy_of=sharding.policy_of, exclusive_optimizers=False, present=sharding.present
    )
    try:
        if values is not None:
            values.prepare()
        api.shard_with(integration, model, **sharding.options)
    except BaseException:
        if values is not None:
            values.restore()
        raise


def refuse_sharded(inner: Sequence[Request], around: Request | nn.Module) -> None:
    """A module that was used before the module around it got its request is an engine of its own by now."""
    for request in inner:
        if request.phase is not Phase.DEFERRED:
            outer = around.label if isinstance(around, Request) else type(around).__name__
            raise StateError(
                f"a {request.label} inside {outer} was used, and so sharded on its own, before sharding of "
                "the module around it was requested",
                "Wrap the outer module, or call fully_shard on it, before the inner one is called or its "
                "parameters are read.",
            )


def copied(module: nn.Module, memo: dict[int, Any]) -> Any:
    """A deep copy of a module with a request.

    An average of weights (a copy) is not called before it is updated from the original: if both were
    deferred, it would be unsharded while the original is sharded. So the model is sharded first, unless it
    is on meta, where both wait for their values.
    """
    request = request_of(module)
    assert request is not None
    if request.phase is Phase.BLANK:
        request.begin()
    elif request.phase is Phase.DEFERRED and outermost(request) is request:
        begin_unless_on_meta(request)
    twin = memo[id(module)] = object.__new__(type(module))
    twin.__dict__.update(copy.deepcopy(module.__dict__, memo))
    return twin
