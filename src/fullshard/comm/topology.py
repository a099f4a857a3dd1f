"""Which ranks shard a model together, and what their arrangement on nodes means for a reduction.

A grid of ranks: its rows are shard groups, its columns hold replicas of one shard.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.environment import launch
from fullshard.errors import OptionError


def rank_grid(mesh: DeviceMesh | None, hybrid: bool) -> torch.Tensor:
    """The grid of ranks for `mesh`. None means all ranks: one row, or one row per node with hybrid."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if mesh is not None:
        return _grid_of_mesh(mesh, hybrid, rank, ranks)
    inner = launch().local_ranks if hybrid else ranks
    if ranks % inner:
        raise OptionError(f"{ranks} ranks cannot be split into nodes of {inner}", "Pass a mesh.")
    return torch.arange(ranks).view(-1, inner)


def _grid_of_mesh(mesh: DeviceMesh, hybrid: bool, rank: int, ranks: int) -> torch.Tensor:
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
    elif grid.dim() != 1:
        raise OptionError(
            f"the mesh has {grid.dim()} axes {names}, but only strategy 'hybrid' uses two",
            "Pass a mesh of one axis, such as mesh['shard'], or strategy='hybrid'.",
        )
    if int(grid.max()) >= ranks:
        raise OptionError(
            f"the mesh names rank {int(grid.max())}, but there are {ranks} ranks",
            "Build the mesh over the ranks of this run.",
        )
    if not bool((grid == rank).any()):
        raise OptionError(
            f"the mesh {grid.tolist()} does not contain rank {rank}",
            "Call fs.shard only on the ranks of the mesh, or build a mesh of every rank.",
        )
    return grid.view(1, -1) if grid.dim() == 1 else grid


def scatter_sends_less(grid: torch.Tensor, device: torch.device, wire_bytes: int, sum_bytes: int) -> bool:
    """Whether a reduce-scatter sends fewer bytes between nodes than an all-to-all would.

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
