"""Model in, ordered units out: tied, frozen and ignored parameters resolved by name.

With no choice given, units are found from the structure alone:
- repeated blocks: two or more children of one class in a ModuleList, ModuleDict or Sequential;
- inside a block, a nested list of blocks counts when it holds most of the block (stages of stages);
- an embedding or head of LARGE_BYTES or more is a unit of its own, both ends of a tie together;
- what is left belongs to the root.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fullshard.errors import ModelError, OptionError
from fullshard.layout import memory_order
from fullshard.options import Options
from fullshard.references import Reference, find_references

LARGE_BYTES = 16 * 2**20
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Member:
    """One parameter of a unit and every (module, attribute) that holds it."""

    name: str
    parameter: nn.Parameter
    sites: tuple[tuple[nn.Module, str], ...]
    references: tuple[Reference, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    @property
    def keeps_dtype(self) -> bool:
        """BatchNorm's statistics are fp32 buffers, and its kernels want parameters of the same dtype."""
        return all(isinstance(m, _BatchNorm) and m.track_running_stats for m, _ in self.sites)

    @property
    def order(self) -> tuple[int, ...]:
        return memory_order(self.shape, tuple(self.parameter.stride()))


@dataclass(eq=False)
class Unit:
    """The parameters that travel together, and the modules whose forward needs them."""

    name: str
    modules: tuple[nn.Module, ...]
    members: list[Member] = field(default_factory=list)


def find_units(model: nn.Module, options: Options) -> list[Unit]:
    """All units in definition order, the root first. Units without parameters are left out."""
    ignored = _ignored(model, options)
    members = _members(model, ignored)
    names = {module: name for name, module in model.named_modules()}
    chosen = _chosen(model, options)
    groups = _large_leaves(model, members, chosen) if options.units is None else []
    units = [Unit("", (model,))] + [Unit(names[m], (m,)) for m in chosen] + groups
    home = {module: unit for unit in units for module in unit.modules}
    parents = {child: module for module in model.modules() for child in module.children()}
    for member in members:
        _nearest_common(member, home, parents, units[0]).members.append(member)
    position = {module: i for i, module in enumerate(model.modules())}
    rest = sorted((u for u in units[1:] if u.members), key=lambda u: position[u.modules[0]])
    return [units[0], *rest]


def _members(model: nn.Module, ignored: set[int]) -> list[Member]:
    sites: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                sites[id(parameter)].append((module, attribute))
    references = find_references(model)
    found = []
    for name, parameter in model.named_parameters():
        if id(parameter) in ignored:
            continue
        if parameter.layout is not torch.strided:
            raise ModelError(
                f"parameter {name!r} has layout {parameter.layout}, which cannot be cut in intervals",
                "List it in ignore=, or make it dense.",
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(
                f"parameter {name!r} is lazy and has no shape yet", "Run one forward before sharding."
            )
        held = tuple(references.get(id(parameter), ()))
        found.append(Member(name, parameter, tuple(sites[id(parameter)]), held))
    return found


def _ignored(model: nn.Module, options: Options) -> set[int]:
    ignored: set[int] = set()
    named = dict(model.named_parameters(remove_duplicate=False))
    for entry in options.ignore:
        if isinstance(entry, nn.Parameter):
            hit = [entry] if any(p is entry for p in named.values()) else []
        elif isinstance(entry, nn.Module):
            hit = list(entry.parameters()) if any(m is entry for m in model.modules()) else []
        else:
            hit = [
                p
                for n, p in named.items()
                if n == entry or n.startswith(entry + ".") or fnmatchcase(n, entry)
            ]
        if not hit:
            label = entry if isinstance(entry, str) else type(entry).__name__
            raise OptionError(
                f"ignore names {label!r}, but the model has no such parameter or module",
                "Give names as model.named_parameters() shows them.",
            )
        ignored.update(id(p) for p in hit)
    return ignored


def _chosen(model: nn.Module, options: Options) -> list[nn.Module]:
    choice = options.units
    if choice is None:
        return [m for m in dict.fromkeys(_blocks(model, None)) if m is not model]
    if isinstance(choice, tuple):
        picked = [m for m in model.modules() if isinstance(m, choice) and m is not model]
    else:
        picked = [m for m in model.modules() if m is not model and choice(m)]
    if isinstance(choice, tuple) and not picked and not isinstance(model, choice):
        raise OptionError(
            f"no module of the model is a {' or '.join(c.__name__ for c in choice)}",
            "Give classes that the model contains, or units=None to find units.",
        )
    for module in picked:
        if not has_forward(module):
            raise OptionError(
                f"units picks a {type(module).__name__}, which has no forward of its own",
                "Pick its children.",
            )
    return picked


def has_forward(module: nn.Module) -> bool:
    """A list of modules has none; a compiled module may have it on the instance."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _blocks(module: nn.Module, block: nn.Module | None) -> Iterator[nn.Module]:
    """Repeated blocks below `module`; `block` is the block it lies in, if any."""
    repeated = _repeated(module) if isinstance(module, _CONTAINERS) else []
    if block is not None:
        # Inside a block: a stage of blocks, yes; the two Linears of its MLP, no.
        repeated = [m for m in repeated if next(m.children(), None) is not None]
        if 2 * sum(map(_size, repeated)) < _size(block):
            repeated = []
    for child in module.children():
        if any(child is m for m in repeated):
            yield child
            yield from _blocks(child, child)
        else:
            yield from _blocks(child, block)


def _repeated(container: nn.Module) -> list[nn.Module]:
    by_class: dict[type, list[nn.Module]] = defaultdict(list)
    for child in container.children():
        if has_forward(child) and any(True for _ in child.parameters()):
            by_class[type(child)].append(child)
    repeated = {id(m) for group in by_class.values() if len(group) > 1 for m in group}
    return [m for m in container.children() if id(m) in repeated]


def _large_leaves(model: nn.Module, members: list[Member], chosen: list[nn.Module]) -> list[Unit]:
    """Embeddings and heads big enough to travel alone, outside every block."""
    in_blocks = {id(m) for block in chosen for m in block.modules()}
    names = {module: name for name, module in model.named_modules()}
    found, taken = [], set(in_blocks)
    for member in members:
        modules = tuple(dict.fromkeys(module for module, _ in member.sites))
        size_bytes = member.parameter.numel() * member.parameter.element_size()
        leaves = all(next(m.children(), None) is None and m is not model for m in modules)
        if size_bytes >= LARGE_BYTES and leaves and not any(id(m) in taken for m in modules):
            taken.update(map(id, modules))
            found.append(Unit(names[modules[0]], modules))
    return found


def _nearest_common(
    member: Member,
    home: dict[nn.Module, Unit],
    parents: dict[nn.Module, nn.Module],
    root: Unit,
) -> Unit:
    """The innermost unit whose modules contain every site of a parameter."""

    def enclosing(module: nn.Module) -> list[Unit]:
        chain, seen = [], module
        while True:
            if seen in home:
                chain.append(home[seen])
            if seen not in parents:
                return chain
            seen = parents[seen]

    holders = [module for module, _ in member.sites] + [r.holder for r in member.references]
    chains = [enclosing(module) for module in holders]
    for unit in chains[0]:
        if all(unit in chain for chain in chains):
            return unit
    return root
