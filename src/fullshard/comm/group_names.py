"""How a process group that only its members create gets the same name on all of them.

torch derives that name from the ranks and from the number of groups that the process knows. A script's own
`new_group([0])` makes that number differ between ranks: they would wait for each other under different names
forever. There is no public argument for the name, so there are two ways to make it agree:

- torch's naming function is replaced for one call (`_hash_ranks_to_str` of torch 2.11 to 2.13);
- where torch has no such function any more, the members agree on the number of groups through the store, and
  those that know fewer create groups of their own rank alone until they know as many.

The second needs a message between the members for each group and leaves groups behind, so it is the fallback.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import distributed_c10d

from fullshard.comm.store_link import reaching_the_store

_NAMING = "_hash_ranks_to_str"


@contextmanager
def named_by_members(ranks: list[int]) -> Iterator[None]:
    """Inside, a group of these ranks gets one name on all of them, whatever other groups each one is in."""
    rank, store = distributed_c10d.get_rank(), distributed_c10d._get_default_store()
    key = f"fullshard group {hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
    count = times_called(store, key, len(ranks))
    torchs = _naming_function()
    if torchs is None:
        _know_equally_many_groups(store, f"{key} {count}", rank, ranks)
        yield
        return
    setattr(distributed_c10d, _NAMING, lambda ranks: f"{key} {count}")  # noqa: ARG005
    try:
        yield
    finally:
        setattr(distributed_c10d, _NAMING, torchs)


def times_called(store: Any, key: str, ranks: int) -> int:
    """How often all of these ranks have called this before, for as long as the store lasts.

    One counter for all ranks: none of them comes to the next call before all have made this one.
    """
    with reaching_the_store():
        return int(store.add(key, 1) - 1) // ranks


def _naming_function() -> Callable[[list[int]], str] | None:
    """torch's function from ranks to a name, if it is still there and takes the ranks alone."""
    function = getattr(distributed_c10d, _NAMING, None)
    caller = getattr(distributed_c10d, "_process_group_name", None)
    if not callable(function) or _NAMING not in getattr(getattr(caller, "__code__", None), "co_names", ()):
        return None
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    return function if list(parameters) == ["ranks"] else None


def _know_equally_many_groups(store: Any, key: str, rank: int, ranks: list[int]) -> None:
    known = _known_groups()
    with reaching_the_store():
        store.set(f"{key} known to {rank}", str(known))
        most = max(int(store.get(f"{key} known to {member}")) for member in ranks)
    for _ in range(most - known):
        distributed_c10d.new_group([rank], use_local_synchronization=True)


def _known_groups() -> int:
    """Groups that this process is a member of. 0 if torch does not count them: then the count has no effect
    on the name, as far as anybody can know."""
    return len(getattr(getattr(distributed_c10d, "_world", None), "pg_names", ()))
