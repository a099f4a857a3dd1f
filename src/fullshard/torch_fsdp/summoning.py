"""`summon_full_params`: unsharded parameters on all ranks or the first, on device or host, with gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from fullshard.engine.gradients import plainly
from fullshard.engine.lane import Lane
from fullshard.engine.pieces import in_memory_order, piece_view
from fullshard.engine.runtime import Runtime, engine_of
from fullshard.engine.unit import LiveUnit
from fullshard.torch_fsdp.state_dicts import gather_lane, is_first
from fullshard.torch_fsdp.wrapper_requests import Wrapper, begin, wrapper_request, wrappers_in


@contextmanager
def summoned(module: nn.Module, recurse: bool, how: tuple[bool, bool, bool, bool]) -> Iterator[None]:
    """`how` is (writeback, rank0_only, offload_to_cpu, with_grads). All ranks enter together."""
    writeback, first_only, to_host, with_gradients = how
    with ExitStack() as stack:
        for runtime, units in _to_open(module, recurse):
            for unit in units:
                if unit.is_unsharded:
                    continue
                gradients = _Gradients(unit) if with_gradients else None
                if gradients is not None:
                    stack.callback(gradients.put_back)
                stack.enter_context(runtime.opened([unit], writeback))
                if first_only and not is_first(runtime):
                    _close(unit)  # one unit after the other: this rank never holds more than one
                    continue
                if to_host:
                    _move_to_host(unit)
                if gradients is not None:
                    gradients.show()
                    stack.callback(gradients.take, writeback)
        yield


def _to_open(module: nn.Module, recurse: bool) -> list[tuple[Runtime, list[LiveUnit]]]:
    wrappers = wrappers_in(module)
    for wrapper in wrappers:
        begin(wrapper)
    runtimes = {runtime: w for w in reversed(wrappers) if (runtime := engine_of(w)) is not None}
    if recurse:
        return [(runtime, runtime.units_of(module)) for runtime in reversed(runtimes)]
    runtime = engine_of(module)
    if runtime is None or not isinstance(module, Wrapper):
        return []
    return [(runtime, runtime.units_holding(wrapper_request(module).own_parameters()))]


def _close(unit: LiveUnit) -> None:
    unit.is_unsharded = False
    for lane in unit.lanes:
        lane.reshard(writeback=False)


def _move_to_host(unit: LiveUnit) -> None:
    """Unsharded values are moved off the device; what is written back is read from the host."""
    for lane in unit.lanes:
        if lane.unsharded is not None and lane.unsharded.device.type != "cpu":
            lane.unsharded = lane.unsharded.cpu()
            for parameter, piece in zip(lane.parameters, lane.layout.pieces, strict=True):
                parameter.data = piece_view(lane.unsharded, piece)


class _Gradients:
    """`p.grad` of one unit, an unsharded plain tensor while its parameters are unsharded."""

    def __init__(self, unit: LiveUnit) -> None:
        self._lanes = [lane for lane in unit.lanes if not lane.replicated]  # others are unsharded already
        self._shards = [_shards(lane) for lane in self._lanes]
        self._unsharded = [
            _gathered(lane, held) for lane, held in zip(self._lanes, self._shards, strict=True)
        ]
        self._kept: list[tuple[nn.Parameter, torch.Tensor]] = []

    def show(self) -> None:
        for lane, held, values in zip(self._lanes, self._shards, self._unsharded, strict=True):
            for index in held:
                lane.parameters[index].grad = piece_view(values, lane.layout.pieces[index])

    def take(self, writeback: bool) -> None:
        """Before the parameters are shards again: a gradient has its parameter's shape at any time."""
        for lane, held in zip(self._lanes, self._shards, strict=True):
            for index, shard in held.items():
                parameter, piece = lane.parameters[index], lane.layout.pieces[index]
                now, parameter.grad = parameter.grad, None
                if now is None and writeback:
                    continue
                if now is not None and writeback:
                    start, stop = lane.layout.kept(piece, lane.comm.rank)
                    _plain(shard).view(-1).copy_(in_memory_order(now.detach(), piece)[start:stop])
                self._kept.append((parameter, shard))

    def put_back(self) -> None:
        for parameter, shard in self._kept:
            parameter.grad = shard


def _shards(lane: Lane) -> dict[int, torch.Tensor]:
    return {i: p.grad for i, p in enumerate(lane.parameters) if p.grad is not None}


def _gathered(lane: Lane, held: dict[int, torch.Tensor]) -> torch.Tensor:
    if not held:
        return lane.rest.new_empty(0)
    for gradient in held.values():
        gradient.detach()  # refused while it is postponed: its values are not there
    return gather_lane(lane, {i: _plain(g) for i, g in held.items()}, lane.dtypes.rest)


def _plain(gradient: torch.Tensor) -> torch.Tensor:
    with plainly():
        return gradient.detach().as_subclass(torch.Tensor)  # type: ignore[no-any-return,unused-ignore]
