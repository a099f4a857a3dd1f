"""A mesh in, a grid of ranks out: rows are shard groups, columns replicas. Pure."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from fullshard.errors import OptionError


def grid_of(mesh: DeviceMesh, hybrid: bool, rank: int, ranks: int) -> torch.Tensor:
    if not isinstance(mesh, DeviceMesh):
        raise OptionError(f"mesh is {mesh!r}", "Give a torch DeviceMesh, or None for all ranks.")
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
            f"the mesh {grid.tolist()} leaves out rank {rank}",
            "Call fs.shard on the ranks of the mesh alone, or build one with every rank.",
        )
    return grid.view(1, -1) if grid.dim() == 1 else grid
