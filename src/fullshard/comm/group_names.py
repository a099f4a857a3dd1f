"""How a process group that only its members create gets the same name on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import distributed_c10d


@contextmanager
def named_by_members(ranks: list[int]) -> Iterator[None]:
    """Inside, torch gives a group of these ranks one name on all of them, whatever other groups each is in.

    For a group that only its members create, torch derives the name from the number of groups that the
    process knows. A script's own `new_group([0])` makes that number differ between ranks: they would wait
    for each other under different names forever. Here groups of the same ranks are counted instead.
    """
    rank, store = distributed_c10d.get_rank(), distributed_c10d._get_default_store()
    name = f"fullshard {ranks} {store.add(f'fullshard {ranks} of {rank}', 1)}"
    torchs = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name  # noqa: ARG005
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = torchs
