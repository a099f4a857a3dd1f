"""What a wrapper's `state_dict()` holds under each of torch's three types, and what it loads.

FULL holds plain unsharded tensors, SHARDED StateShards, LOCAL this rank's elements as flat plain tensors with
a stamp of their rank and layout. Keys are always those of the module without wrappers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fullshard.engine.homes.split_masters import address
from fullshard.engine.lane import Lane
from fullshard.engine.pieces import piece_view
from fullshard.engine.runtime import Runtime, engine_of
from fullshard.errors import FullshardError, StateError
from fullshard.state.state_dict import BeforeLoad, StateShard, shard_of
from fullshard.torch_fsdp import strategies
from fullshard.torch_fsdp.strategies import StateDictSettings, StateDictType
from fullshard.torch_fsdp.wrapper_requests import WRAPPED, Wrapper, clean, wrappers_in

STAMP = "_local_layout"  # under LOCAL_STATE_DICT: rank, ranks, and a checksum of the layout
_taking: set[int] = set()  # engines whose state dict is being taken


def gather_lane(lane: Lane, pieces: dict[int, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The unsharded values of what is laid out like this lane; a collective.

    `pieces` are this rank's elements, by index: of the parameters, or of a state of their optimizer.
    """
    return lane.gather_pieces(pieces, dtype, lane.comm.tag(lane.unit, "full"))


def is_first(runtime: Runtime) -> bool:
    return runtime.comm.world_rank == runtime.comm.members[0]


# ---- taking


def take(wrapper: Wrapper, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """The wrapped module's state dict, in the form that the settings of the outermost call define."""
    runtime = engine_of(wrapper)
    before = set(destination)
    outer = runtime is not None and id(runtime) not in _taking
    if outer:
        _taking.add(id(runtime))
    try:
        wrapper._fsdp_wrapped_module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
    finally:
        if outer:
            _taking.discard(id(runtime))
    for name, dtype in wrapper.buffer_dtypes.items():
        if prefix + name in destination:
            destination[prefix + name] = destination[prefix + name].to(dtype)
    if outer and runtime is not None:
        new = [key for key in destination if key not in before]
        _convert(runtime, wrapper.state_dict_settings, destination, (prefix, new))


def _convert(
    runtime: Runtime, settings: StateDictSettings, state: dict[str, Any], under: tuple[str, list[str]]
) -> None:
    prefix, keys = under
    config = settings.state_dict_config
    if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        for key in keys:
            if isinstance(state[key], StateShard):
                state[key] = state[key].local.view(-1)
        state[prefix + STAMP] = _stamp(runtime)
    elif settings.state_dict_type is StateDictType.FULL_STATE_DICT:
        keep = not getattr(config, "rank0_only", False) or is_first(runtime)
        _gather_into(runtime, state, keys, keep, config.offload_to_cpu)
        if not keep:
            for key in keys:
                del state[key]
            return
    if config.offload_to_cpu:
        for key in keys:
            state[key] = _on_host(state[key])


def _gather_into(
    runtime: Runtime, state: dict[str, Any], keys: Iterable[str], keep: bool, to_host: bool
) -> None:
    """Unsharded values in the place of shards: with `to_host` one lane at a time is on the device."""
    known = {lane.layout.pieces[index]: (lane, index) for _, lane, index in runtime.places()}
    by_lane: dict[Lane, dict[int, list[str]]] = {}
    copies: dict[Any, torch.Tensor] = {}  # of what is not sharded: training must not change a state dict
    for key in keys:
        if isinstance(state[key], StateShard):
            lane, index = known[state[key].piece]
            by_lane.setdefault(lane, {}).setdefault(index, []).append(key)
        elif isinstance(state[key], torch.Tensor) and keep:
            value = state[key]
            if not to_host or value.is_cpu:
                same = address(value), tuple(value.shape), value.stride(), value.dtype  # tied ones stay one
                state[key] = copies[same] = copies[same] if same in copies else value.detach().clone()
    for lane in dict.fromkeys(lane for _, lane, _ in runtime.places()):
        if lane not in by_lane:
            continue
        values = gather_lane(lane, dict(enumerate(lane.parameters)), lane.dtypes.rest)
        for index, names in by_lane[lane].items() if keep else ():
            value = piece_view(values, lane.layout.pieces[index])
            value = value.cpu() if to_host and value.device.type != "cpu" else value.clone()
            state.update(dict.fromkeys(names, value))  # tied names share it


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _stamp(runtime: Runtime) -> torch.Tensor:
    lanes = dict.fromkeys(lane for _, lane, _ in runtime.places())
    rows = [f"{lane.layout.interval} {lane.layout.pieces}" for lane in lanes]
    comm = runtime.comm
    return torch.tensor([comm.rank, comm.ranks, zlib.crc32("\n".join(rows).encode())])


# ---- loading


def rename(wrapper: Wrapper, state: dict[str, Any], prefix: str) -> None:
    """From keys of the plain module to those that torch's loading looks up, in place; wrapped ones stay.

    The wrappers inside are renamed as well, so that the values can be checked before one of them is copied.
    Names inside another library's wrapper are left alone: our wrapper inside that renames the rest.
    """
    raw = {clean(name): name for name, _ in nn.Module.named_modules(wrapper, remove_duplicate=False)}
    for key in [k for k in state if k.startswith(prefix)]:
        path, _, leaf = clean(key[len(prefix) :]).rpartition(".")
        rest: list[str] = [leaf]
        while path not in raw:
            path, _, part = path.rpartition(".")
            rest.insert(0, part)
        target = f"{prefix}{raw[path]}.{'.'.join(rest)}"
        if target != key:
            state[target] = state.pop(key)


def prepare(wrapper: Wrapper, state: dict[str, Any], prefix: str) -> None:
    """Before a wrapper's part of `state` is loaded, in place."""
    settings = wrapper.state_dict_settings
    runtime = engine_of(wrapper)
    stamp = state.pop(prefix + STAMP, None)
    rename(wrapper, state, prefix)
    if stamp is not None and runtime is not None:
        if settings.state_dict_type is not StateDictType.LOCAL_STATE_DICT:
            raise StateError(
                "this state dict holds one rank's elements (LOCAL_STATE_DICT)",
                "Load it inside `with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):`.",
            )
        _from_local(runtime, wrapper, state, (prefix, stamp))


def _from_local(
    runtime: Runtime, wrapper: Wrapper, state: dict[str, Any], where: tuple[str, torch.Tensor]
) -> None:
    prefix, stamp = where
    mine = _stamp(runtime)
    if not torch.equal(stamp.cpu(), mine):
        rank, ranks, _ = stamp.tolist()
        raise StateError(
            f"this state dict holds the elements of rank {rank} of {ranks}, in another layout than that of "
            f"rank {int(mine[0])} of {int(mine[1])} here",
            "Load on each rank what it saved, with the same number of ranks, or use FULL_STATE_DICT.",
        )
    known = {id(p): (lane, index) for p, lane, index in runtime.places()}
    for name, parameter in nn.Module.named_parameters(wrapper, remove_duplicate=False):
        key = prefix + name
        if id(parameter) in known and isinstance(state.get(key), torch.Tensor):
            lane, index = known[id(parameter)]
            if not lane.replicated:
                state[key] = shard_of(lane, index, state[key], key)


def check_all(wrapper: Wrapper, state: dict[str, Any]) -> None:
    """Every value, before one of them is copied: a bad file changes nothing."""
    for name, module in nn.Module.named_modules(wrapper):
        for hook in module._load_state_dict_pre_hooks.values():
            if isinstance(hook.hook, BeforeLoad):
                try:
                    hook.hook.convert(dict(state), f"{name}." if name else "")
                except FullshardError as error:
                    raise type(error)(error.what.replace(WRAPPED + ".", ""), error.remedy) from None


def settings_of(module: nn.Module) -> StateDictSettings:
    """Of all wrappers in `module`, which must agree."""
    settings = [wrapper.state_dict_settings for wrapper in wrappers_in(module)]
    if any(other != settings[0] for other in settings[1:]):
        raise StateError(
            "wrappers inside one module have different state dict types", "Set it on the outermost module."
        )
    return settings[0] if settings else strategies.settings(StateDictType.FULL_STATE_DICT)
