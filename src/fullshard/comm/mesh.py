"""A mesh in, a grid of ranks out: rows are shard groups, columns replicas. And how a group is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed import distributed_c10d
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


@contextmanager
def named_by_members(ranks: list[int]) -> Iterator[None]:
    """Inside it torch names a group of these ranks as all of them do, whatever other groups each is in.

    For a group that only its members make, torch's name holds the number of groups that the process knows. A
    script's own `new_group([0])` makes that differ between ranks: they would wait for each other, under
    different names, forever. Groups of the same ranks are counted instead, for as long as the world lasts.
    """
    rank, store = distributed_c10d.get_rank(), distributed_c10d._get_default_store()
    name = f"fullshard {ranks} {store.add(f'fullshard {ranks} of {rank}', 1)}"
    torchs = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name  # noqa: ARG005
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = torchs
