"""Which ranks shard a model together, and on which nodes they are.

A grid of ranks: its rows are shard groups, its columns hold replicas of one shard. Where ranks that all hold
different shards are on several nodes, with as many on each, its rows are nodes: messages go over two levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.environment import launch
from fullshard.errors import OptionError


def rank_grid(mesh: DeviceMesh | None, hybrid: bool) -> torch.Tensor:
    """The grid of ranks for `mesh`. None means all ranks, in one row: `arrange` makes rows of nodes."""
    ranks = dist.get_world_size()
    return torch.arange(ranks).view(1, -1) if mesh is None else _grid_of_mesh(mesh, hybrid, ranks)


def refuse_outsider(mesh: DeviceMesh | None) -> None:
    """On a rank that is not in `mesh`: an error of this rank alone. Those of the mesh do not wait for it."""
    if isinstance(mesh, DeviceMesh) and not bool((mesh.mesh == dist.get_rank()).any()):
        raise OptionError(
            f"the mesh {mesh.mesh.tolist()} does not contain rank {dist.get_rank()}",
            "Call fs.shard only on the ranks of the mesh, or build a mesh of every rank.",
        )


def _grid_of_mesh(mesh: DeviceMesh, hybrid: bool, ranks: int) -> torch.Tensor:
    if not isinstance(mesh, DeviceMesh):
        raise OptionError(f"mesh is {mesh!r}", "Pass a torch DeviceMesh, or None for all ranks.")
    grid, names = mesh.mesh.cpu(), tuple(mesh.mesh_dim_names or ())
    if hybrid:
        if grid.dim() != 2 or set(names) != {"replicate", "shard"}:
            raise OptionError(
                f"strategy 'hybrid' got a mesh with axes {names or grid.dim()}",
                'Use init_device_mesh(device, (R, S), mesh_dim_names=("replicate", "shard")).',
            )
        grid = grid if names == ("replicate", "shard") else grid.t()
    elif grid.dim() == 2 and set(names) == {"node", "shard"}:
        grid = grid if names == ("node", "shard") else grid.t()
    elif grid.dim() != 1:
        raise OptionError(
            f"the mesh has {grid.dim()} axes {names}, but only strategy 'hybrid' replicates over one of two",
            "Pass a mesh of one axis, such as mesh['shard'], or strategy='hybrid'; axes named "
            "('node', 'shard') shard over both, in messages inside a node and between nodes.",
        )
    if int(grid.max()) >= ranks:
        raise OptionError(
            f"the mesh names rank {int(grid.max())}, but there are {ranks} ranks",
            "Build the mesh over the ranks of this run.",
        )
    return grid.view(1, -1) if grid.dim() == 1 else grid


def names_nodes(mesh: DeviceMesh | None) -> bool:
    """Whether the axes of `mesh` state which ranks a node has, or a group of strategy 'hybrid'."""
    names = set(mesh.mesh_dim_names or ()) if isinstance(mesh, DeviceMesh) else set()
    return "shard" in names and bool(names & {"node", "replicate"})


def members(mesh: DeviceMesh | None) -> torch.Tensor:
    """All ranks of `mesh`, however its axes are used; None means all ranks."""
    if isinstance(mesh, DeviceMesh):
        return mesh.mesh.cpu().reshape(1, -1)
    return torch.arange(dist.get_world_size()).view(1, -1)


@dataclass(frozen=True)
class Arrangement:
    """A grid of ranks. On two levels its rows are nodes, and each rank of it holds another shard."""

    grid: torch.Tensor
    two_level: bool = False
    why_flat: str = ""  # ranks are on several nodes, but not in a way that two levels can use
    one_per_node: bool = False

    @property
    def nodes(self) -> int:
        """How many groups sum gradients among themselves before these sums are added up."""
        return len(self.grid)

    @property
    def rows_cross_nodes(self) -> bool:
        """Whether the ranks of a row are on several nodes."""
        return self.one_per_node or bool(self.why_flat)


@dataclass(frozen=True)
class Place:
    """Where a rank runs, as its launcher has it: which of how many ranks of its node."""

    local_rank: int
    local_ranks: int


def own_place() -> Place:
    """This rank's. One that no launcher started is taken to be alone on its node."""
    launched = launch()
    if (launched.rank, launched.ranks) != (dist.get_rank(), dist.get_world_size()):
        return Place(0, 1)
    return Place(launched.local_rank, launched.local_ranks)


def places_without_peers(members: Sequence[int]) -> list[Place] | None:
    """Where the ranks of a group whose other members are no processes run; None for ranks that can answer."""
    inner = getattr(dist.group.WORLD, "node_ranks", None)
    if inner is None:
        return None
    return [Place(rank % inner, inner) for rank in members]


def arrange(grid: torch.Tensor, hybrid: bool, places: Sequence[Place], named: bool = False) -> Arrangement:
    """Two levels, if the one row of `grid` is on several nodes, with as many ranks on each, and several.

    `places` are those of the grid's ranks in rising order. The same on all ranks.
    named: the grid is that of a mesh whose axes state where a node ends.
    """
    if hybrid:
        return Arrangement(grid if named else _row_per_node(grid, places))
    if named:
        two_level = min(grid.shape) > 1
        return Arrangement(grid if two_level else grid.reshape(1, -1), two_level, one_per_node=len(grid) > 1)
    row = grid[0].tolist()
    sizes = sorted({place.local_ranks for place in places}, reverse=True)
    if sizes == [1] or sizes[-1] >= len(row) == dist.get_world_size():
        return Arrangement(grid, one_per_node=sizes == [1])
    if len(sizes) > 1:
        return Arrangement(grid, why_flat=f"nodes of {' and '.join(map(str, sizes))} ranks")
    if not _numbered_by_node(row, places):
        return Arrangement(grid, why_flat=_NOT_NUMBERED)
    by_node: dict[int, list[int]] = {}
    for rank in row:
        by_node.setdefault(rank // sizes[0], []).append(rank)
    counts = {len(ranks) for ranks in by_node.values()}
    if len(counts) > 1:
        return Arrangement(grid, why_flat=f"{' and '.join(map(str, sorted(counts)))} of the ranks on a node")
    if len(by_node) == 1 or counts == {1}:
        return Arrangement(grid, one_per_node=len(by_node) > 1)
    return Arrangement(torch.tensor(list(by_node.values())), two_level=True)


_NOT_NUMBERED = "the ranks of a node are not numbered one after the other"


def _numbered_by_node(ranks: Sequence[int], places: Sequence[Place]) -> bool:
    """Of nodes with equal numbers of ranks."""
    pairs = zip(sorted(ranks), places, strict=True)
    return all(rank % place.local_ranks == place.local_rank for rank, place in pairs)


def _row_per_node(grid: torch.Tensor, places: Sequence[Place]) -> torch.Tensor:
    """For strategy 'hybrid' without a mesh: each node is a group."""
    sizes = sorted({place.local_ranks for place in places}, reverse=True)
    problem = None
    if len(sizes) > 1:
        problem = f"there are nodes of {' and '.join(map(str, sizes))} ranks"
    elif grid.numel() % sizes[0]:
        problem = f"{grid.numel()} ranks cannot be split into nodes of {sizes[0]}"
    elif not _numbered_by_node(grid[0].tolist(), places):
        problem = _NOT_NUMBERED
    if problem is not None:
        raise OptionError(
            f"strategy 'hybrid' without a mesh shards inside each node, and {problem}",
            "Pass a mesh with axes ('replicate', 'shard'), or choose strategy='zero3'.",
        )
    return grid.view(-1, sizes[0])


def scatter_sends_less(grid: torch.Tensor, device: torch.device, wire_bytes: int, sum_bytes: int) -> bool:
    """Whether a reduce-scatter sends fewer bytes between nodes than an all-to-all would, where there is one
    level only.

    A reduce-scatter sums inside a node before data crosses to the next one, so the sum's bytes divided by the
    ranks of a node cross; in an all-to-all every rank's own message crosses. Inside one node, or with one
    rank per node, the all-to-all of narrower gradients sends less. gloo's reduce-scatter is an all-reduce.
    """
    rank, inner = dist.get_rank(), getattr(dist.group.WORLD, "node_ranks", None)
    if inner is None:  # the group does not state how many of its ranks share a node, but the launcher does
        if device.type == "cpu" or dist.get_backend() == "gloo":
            return False
        inner = launch().local_ranks
    row = grid[int(torch.where(grid == rank)[0][0])].tolist()
    nodes = len({r // inner for r in row})
    return nodes > 1 and sum_bytes * nodes < wire_bytes * len(row)
