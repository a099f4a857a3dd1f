"""The units of a model, in order: tied, frozen and ignored parameters are resolved by name.

With no choice given, units are found from the structure alone:
- repeated blocks: two or more children of one class in a ModuleList, ModuleDict or Sequential;
- inside a block, a nested list of blocks counts when it holds most of the block (stages of stages);
- a model of at most TINY_BYTES is one unit, the root;
- blocks that follow each other in one container are one unit, up to MERGE_BYTES, and a block of no more
  than that is not divided (the option merge_units replaces both thresholds);
- an embedding or head of LARGE_BYTES or more is a unit of its own, both ends of a tie together;
- what is left belongs to the root.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fullshard.errors import ModelError, OptionError
from fullshard.options import Options
from fullshard.plan.aliases import Alias, find_aliases, refuse_shared_memory
from fullshard.plan.layout import Region, memory_order
from fullshard.plan.tensor_parallel import largest_part, local_of, mesh_of, region_of
from fullshard.policy import DEFAULT_POLICY, UnitPolicy
from fullshard.precision import lane_dtypes

LARGE_BYTES = 16 * 2**20
# Up to this many bytes, blocks share a unit. Two gloo ranks on a busy 2-core host, zero3, steps of all
# settings interleaved, step time against no merging (median of ratios, one run): GPT of 0.3M parameters in
# 6 blocks 0.85 with 4, 0.85 with 8, 0.86 with 16 MiB; 3.2M in 16 blocks 0.76, 0.87, 0.88; 25M in 32 blocks
# of 3 MiB, which 4 MiB leaves apart, 1.00, 1.10, 1.10. Settings that made the same units differed by up to
# 14%: merging helps small models, but this does not separate 4, 8 and 16 MiB. 4 holds the least memory.
MERGE_BYTES = 4 * 2**20
# On a GPU the host's time decides. GPT of 124M in 12 blocks, bf16, on an H200 (8 simulated ranks, one run,
# median ms per step; the plain model takes 22.6): 31.7 with 4, 29.8 with 32, 28.5 with 48, 26.3 with 96 MiB.
CUDA_MERGE_BYTES = 96 * 2**20
# A model of no more than this is one unit. GPT of 0.3M parameters in 6 blocks, two gloo ranks, zero3, step
# time to DDP's in the same run: 1.34 with one unit for the blocks and the root, 1.14 with one for all.
TINY_BYTES = 4 * 2**20
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_WILDCARDS = set("*?[")


@dataclass(frozen=True)
class Member:
    """One parameter of a unit and every (module, attribute) that holds it.

    In a tensor-parallel model, `region` is the part that this rank holds.
    """

    name: str
    parameter: nn.Parameter
    sites: tuple[tuple[nn.Module, str], ...]
    aliases: tuple[Alias, ...] = ()
    region: Region | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(local_of(self.parameter).shape)

    @property
    def keeps_dtype(self) -> bool:
        """BatchNorm's statistics are buffers, and its kernels need parameters of the same dtype."""
        return all(
            isinstance(m, _BatchNorm)
            and m.running_mean is not None
            and m.running_mean.dtype == self.parameter.dtype
            for m, _ in self.sites
        )

    @property
    def order(self) -> tuple[int, ...]:
        return memory_order(self.shape, tuple(local_of(self.parameter).stride()))


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered and reduced together, and the modules whose forward needs them."""

    name: str
    modules: tuple[nn.Module, ...]
    members: list[Member] = field(default_factory=list)
    merged: bool = False  # its modules are neighbouring blocks, not those that share a tied parameter
    policy: UnitPolicy = DEFAULT_POLICY


def looks_up_only(modules: Sequence[nn.Module]) -> bool:
    """Only embeddings: the gradient of a lookup needs the indices, not the table."""
    return all(type(m) is nn.Embedding and m.max_norm is None for m in modules)


def find_units(model: nn.Module, options: Options) -> list[Unit]:
    """All units in definition order, the root first. Units without parameters are left out."""
    ignored = _ignored(model, options)
    refuse_shared_memory(model, ignored)
    members = _members(model, ignored)
    names = {module: name for name, module in model.named_modules()}
    chosen = _chosen(model, options)
    parents = {child: module for module in model.modules() for child in module.children()}
    if options.units is None and _is_tiny(members, options):
        together, groups = [], []  # one unit: hooks and messages would cost more than overlap gains
    elif options.units is None:
        together = _merge(chosen, parents, members, options)
        groups = _large_leaves(model, members, chosen)
    else:
        together, groups = [(module,) for module in chosen], []
    blocks = [Unit(_merged_name([names[m] for m in ms]), ms, merged=len(ms) > 1) for ms in together]
    units = [Unit("", (model,)), *blocks, *groups]
    if options.integration.policy_of is not None:
        for unit in units:
            unit.policy = options.integration.policy_of(unit.modules[0])
    home = {module: unit for unit in units for module in unit.modules}
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
    aliases = find_aliases(model)
    mesh = mesh_of(model)
    found = []
    for name, parameter in model.named_parameters():
        if id(parameter) in ignored:
            continue
        if parameter.layout is not torch.strided:
            raise ModelError(
                f"parameter {name!r} has layout {parameter.layout}, which cannot be cut into intervals",
                "List it in ignore=, or make it dense.",
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(
                f"parameter {name!r} is lazy and has no shape yet", "Run one forward before sharding."
            )
        held = tuple(aliases.get(id(parameter), ()))
        region = None if mesh is None else region_of(parameter, mesh)
        found.append(Member(name, parameter, tuple(sites[id(parameter)]), held, region))
    return found


def _ignored(model: nn.Module, options: Options) -> set[int]:
    """Ids of the parameters that `ignore=` names."""
    if not options.ignore:
        return set()
    named = dict(model.named_parameters(remove_duplicate=False))
    parameters, modules = set(map(id, named.values())), set(model.modules())
    below = _by_prefix(named)
    ignored: set[int] = set()
    for entry in options.ignore:
        if isinstance(entry, nn.Parameter):
            hit = [entry] if id(entry) in parameters else []
        elif isinstance(entry, nn.Module):
            hit = list(entry.parameters()) if entry in modules else []
        else:
            hit = below.get(entry, [])
            if set(entry) & _WILDCARDS:
                hit = hit + [p for name, p in named.items() if fnmatchcase(name, entry)]
        if not hit:
            label = entry if isinstance(entry, str) else type(entry).__name__
            raise OptionError(
                f"ignore names {label!r}, but the model has no such parameter or module",
                "Give names as model.named_parameters() shows them.",
            )
        ignored.update(id(p) for p in hit)
    return ignored


def _by_prefix(named: dict[str, nn.Parameter]) -> dict[str, list[nn.Parameter]]:
    """The parameters of each name, and those below the module of each name."""
    below: dict[str, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in named.items():
        while name:
            below[name].append(parameter)
            name = name.rpartition(".")[0]
    return below


def _chosen(model: nn.Module, options: Options) -> list[nn.Module]:
    choice = options.units
    if choice is None:
        return [m for m in dict.fromkeys(_blocks(model, None, {})) if m is not model]
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
    """A ModuleList has none; a compiled module may have it on the instance."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _blocks(module: nn.Module, block: nn.Module | None, sizes: dict[nn.Module, int]) -> Iterator[nn.Module]:
    """Repeated blocks below `module`; `block` is the block it lies in, if any. `sizes` are those computed."""

    def size(module: nn.Module) -> int:
        if module not in sizes:
            sizes[module] = sum(p.numel() for p in module.parameters())
        return sizes[module]

    repeated = _repeated(module) if isinstance(module, _CONTAINERS) else set()
    if block is not None and repeated:
        # Inside a block: a stage of blocks, yes; the two Linears of its MLP, no.
        repeated = {m for m in repeated if next(m.children(), None) is not None}
        if 2 * sum(map(size, repeated)) < size(block):
            repeated = set()
    for child in module.children():
        if child in repeated:
            yield child
            yield from _blocks(child, child, sizes)
        else:
            yield from _blocks(child, block, sizes)


def _repeated(container: nn.Module) -> set[nn.Module]:
    """Children of a class that two or more of them have."""
    by_class: dict[type, list[nn.Module]] = defaultdict(list)
    for child in container.children():
        if has_forward(child) and any(True for _ in child.parameters()):
            by_class[type(child)].append(child)
    return {m for group in by_class.values() if len(group) > 1 for m in group}


def _merge(
    chosen: list[nn.Module],
    parents: dict[nn.Module, nn.Module],
    members: list[Member],
    options: Options,
) -> list[tuple[nn.Module, ...]]:
    """Blocks in definition order, grouped by the unit that they share."""
    sizes = {id(m.parameter): _full_bytes(m.parameter, options) for m in members}
    most = options.merge_units
    if most is None:
        most = CUDA_MERGE_BYTES if options.on_gpu else MERGE_BYTES
    if not options.checkpoint_activations:  # recomputes unit by unit, so small ones are useful
        small = [b for b in chosen if sum(sizes.get(id(p), 0) for p in b.parameters()) <= most]
        inside = {m for block in small for m in block.modules() if m is not block}
        chosen = [block for block in chosen if block not in inside]
    picked = set(chosen)
    stacks: dict[nn.Module, bool] = {}
    groups: list[list[nn.Module]] = []
    filled, before = 0, None
    for block in chosen:
        company = _company(block, picked, parents, stacks)
        size = 0
        if company is not None:
            size = sum(sizes.pop(id(p), 0) for p in block.parameters())  # a tied parameter counts once
        if company is None or company != before or filled + size > most:
            groups.append([])
            filled = 0
        groups[-1].append(block)
        filled, before = filled + size, company
    return [tuple(group) for group in groups]


def _is_tiny(members: list[Member], options: Options) -> bool:
    if options.checkpoint_activations:  # recomputes unit by unit
        return False
    most = TINY_BYTES if options.merge_units is None else options.merge_units
    return sum(_full_bytes(m.parameter, options) for m in members) <= most


def _full_bytes(parameter: nn.Parameter, options: Options) -> int:
    dtypes = lane_dtypes(parameter.dtype, parameter.requires_grad, options.precision)
    return largest_part(parameter) * dtypes.compute.itemsize


def _company(
    block: nn.Module,
    picked: set[nn.Module],
    parents: dict[nn.Module, nn.Module],
    stacks: dict[nn.Module, bool],
) -> tuple[nn.Module, type | None, bool] | None:
    """What neighbours have in common if they may be one unit; None for a block that stays alone.

    `stacks` remembers the answer of `_is_one_stack` per container.

    A merged unit is full from the first call of its blocks to the last, so they should be called one after
    the other. A container with a forward of its own, such as a Sequential, does so. A ModuleList is taken for
    one stack, or one set of experts, unless another list of blocks is next to it: two are often iterated
    together (`zip(self.convs, self.norms)`), and one of small blocks would stay full during all the large
    ones. Entries of a ModuleDict are called by name, in any order. Experts that some ranks skip may be
    merged: every rank takes part in the gather of each of them in any case.
    """
    if any(m in picked for m in block.modules() if m is not block):
        return None
    trains = any(p.requires_grad for p in block.parameters())  # frozen units are left out of backward
    container = parents[block]
    if has_forward(container):
        return container, None, trains
    if container not in stacks:
        stacks[container] = _is_one_stack(container, picked, parents)
    return (container, type(block), trains) if stacks[container] else None


def _is_one_stack(container: nn.Module, picked: set[nn.Module], parents: dict[nn.Module, nn.Module]) -> bool:
    """A ModuleList with no other list of blocks beside it."""
    siblings = parents[container].children() if container in parents else ()
    lists = [c for c in siblings if isinstance(c, _CONTAINERS) and not picked.isdisjoint(c.children())]
    return isinstance(container, nn.ModuleList) and all(c is container or has_forward(c) for c in lists)


def _merged_name(names: list[str]) -> str:
    """'blocks.0..3' for blocks.0 to blocks.3: for people, not a module's path."""
    return names[0] if len(names) == 1 else f"{names[0]}..{names[-1].rpartition('.')[2]}"


def _large_leaves(model: nn.Module, members: list[Member], chosen: list[nn.Module]) -> list[Unit]:
    """Embeddings and heads outside every block that are large enough for a unit of their own."""
    in_blocks = {id(m) for block in chosen for m in block.modules()}
    names = {module: name for name, module in model.named_modules()}
    found, taken = [], set(in_blocks)
    for member in members:
        modules = tuple(dict.fromkeys(module for module, _ in member.sites))
        size_bytes = largest_part(member.parameter) * member.parameter.element_size()
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

    holders = [module for module, _ in member.sites] + [alias.holder for alias in member.aliases]
    chains = [enclosing(module) for module in holders]
    for unit in chains[0]:
        if all(unit in chain for chain in chains):
            return unit
    return root
