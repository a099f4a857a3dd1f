"""What `fully_shard` leaves on a module until the model is used: a mark.

`fully_shard` is called block by block, bottom-up, and no call knows whether a module further out will follow.
Sharding each block at once, as torch's does, would make every block an engine of its own. So a call only
marks its module. The outermost marked module and all marked ones inside it become one engine, in one
transaction, when the first of them is used.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.torch_fsdp.policies import MixedPrecisionPolicy

_KEY = "_fullshard_mark"
MARKED, EMPTY, LIVE = "marked", "without values yet", "live"


@dataclass(frozen=True)
class Asked:
    """The arguments of one `fully_shard` call."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    policy: MixedPrecisionPolicy
    ignored: frozenset[nn.Parameter]


class Mark:
    """One marked module: what was asked for, how far it is, and what its setters said."""

    def __init__(self, module: nn.Module, asked: Asked, classes: tuple[type, type, type]) -> None:
        self._module = weakref.ref(module)
        self.asked = asked
        self.plain, self.waiting, self.sharded = classes  # the module's class without us, before and after
        self.state = MARKED
        self.window: Any = None  # while its values are being initialised
        self.reshards: bool | None = None  # set_reshard_after_forward
        self.syncs = True  # set_requires_gradient_sync
        self.divisor: float | None = None  # set_gradient_divide_factor
        self.sums_replicas = True  # set_requires_all_reduce
        self.zero_unused = False  # set_reduce_scatter_unused_params
        self.compilations: list[tuple[Any, Any]] = []  # calls of compile() that wait for the engine
        module.__dict__[_KEY] = self
        _waiting.add(module)

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None  # it carries this mark
        return module

    def become(self, state: str) -> None:
        self.state = state
        self.module.__class__ = self.sharded if state == LIVE else self.waiting
        if state == MARKED:
            _waiting.add(self.module)
        else:
            _waiting.discard(self.module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        twin = memo[id(self)] = object.__new__(Mark)
        twin.__dict__.update(vars(self))
        twin._module = weakref.ref(memo[id(self.module)])  # being copied right now: it carries this mark
        twin.compilations = list(self.compilations)
        # Parameters that were copied before are known to `memo`; others are copied now, once.
        ignored = frozenset(copy.deepcopy(list(self.asked.ignored), memo))
        asked = self.asked
        twin.asked = Asked(asked.mesh, asked.reshard_after_forward, asked.policy, ignored)
        if self.state == MARKED:
            _waiting.add(twin.module)
        return twin


_waiting: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def mark_of(module: nn.Module) -> Mark | None:
    mark: Mark | None = module.__dict__.get(_KEY)
    return mark


def marks_in(module: nn.Module) -> Iterator[Mark]:
    """Of `module` and of everything inside it, outer ones first."""
    for inside in module.modules():
        mark = mark_of(inside)
        if mark is not None:
            yield mark


def outermost(module: nn.Module) -> nn.Module:
    """The marked module around `module` that no other marked one is around."""
    found, size = module, 0
    for candidate in list(_waiting):
        inside = set(candidate.modules())
        if module in inside and len(inside) > size:
            found, size = candidate, len(inside)
    return found


def own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """All parameters below `module`, past the methods that would begin to shard it."""
    seen: set[int] = set()
    for inside in module.modules():
        for parameter in inside._parameters.values():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter
