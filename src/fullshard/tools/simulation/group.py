"""A process group of many ranks in which only one is real: the others are taken to send what this one sends.

torch's own FSDP runs through it too: for it this is an ordinary backend of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore, ProcessGroup, ReduceOp

from fullshard.errors import OptionError, StateError, report_errors_as
from fullshard.planning.network import Load, Network
from fullshard.tools.simulation.cuda_wire import CudaWire
from fullshard.tools.simulation.wire import HostWire, Message, deliver

BACKEND = "simulated"
_Group: Any = ProcessGroup  # its stubs name arguments differently between versions


class Cluster:
    """The network, the rank that this process plays, and its links."""

    def __init__(
        self, network: Network, device: torch.device, rank: int = 0, multiprocessors: int = 0
    ) -> None:
        if not 0 <= rank < network.ranks:
            raise OptionError(f"rank {rank} of {network.ranks} ranks", "Ranks count from 0.")
        self.network, self.device, self.rank = network, device, rank
        on_device = device.type == "cuda"
        self.wire: Any = CudaWire(device, multiprocessors) if on_device else HostWire()


class Carried:
    """A message on the wire. `wait` makes the current stream wait, or on a CPU the caller.

    Not a torch Work: making one from Python takes longer than everything else in the simulated wire.
    """

    def __init__(self, cluster: Cluster | None, ticket: Any, keep: Any) -> None:
        self._cluster, self._ticket, self._keep = cluster, ticket, keep
        self.after: Callable[[], Any] | None = None  # to be done with what was received

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._cluster is not None:
            self._cluster.wire.wait(self._ticket, timeout)
        if self.after is not None:
            self.after()
            self.after = None
        return True

    def is_completed(self) -> bool:
        return self._cluster is None or bool(self._cluster.wire.over(self._ticket))

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._keep)
        return future


class SimulatedGroup(_Group):  # type: ignore[misc, unused-ignore]
    """Every collective is delivered from this rank's own data and takes the network's time."""

    def __init__(self, cluster: Cluster, rank: int, members: list[int], name: str) -> None:
        super().__init__(rank, len(members))
        self._cluster, self._rank, self._name = cluster, rank, name
        self._placement = cluster.network.placement(members)
        self._network, self._loads = cluster.network, dict[tuple[str, int], Load]()

    @property
    def group_name(self) -> str:
        return self._name

    peers_are_absent = True  # the engine makes all its groups with this backend

    @property
    def node_ranks(self) -> int:
        """Ranks per node, as a launcher would have them: the engine's choice of how gradients are summed."""
        return self._cluster.network.node_ranks or self._cluster.network.ranks

    def getBackendName(self) -> str:
        return BACKEND

    def _carry(
        self, kind: str, full: torch.Tensor, target: torch.Tensor, source: torch.Tensor, own: int | None
    ) -> Carried:
        if self._placement.ranks == 1 or target.device.type != self._cluster.device.type:
            deliver(target, source, own)  # agreements on the host do not use the wire of a device
            return Carried(None, None, target)
        message = Message(kind, self._load(kind, full.nbytes), self._name)
        ticket = self._cluster.wire.carry(message, target, source, own)
        return Carried(self._cluster, ticket, target)

    def _load(self, kind: str, size_bytes: int) -> Load:
        """Computed once for each size: a step sends the same messages again and again."""
        network = self._cluster.network
        if network is not self._network:
            self._network, self._loads = network, {}
        found = self._loads.get((kind, size_bytes))
        if found is None:
            found = self._loads[kind, size_bytes] = network.load(kind, size_bytes, self._placement)
        return found

    def _own_part(self, full: torch.Tensor) -> torch.Tensor:
        return full.view(-1).view(self._placement.ranks, -1)[self._rank]

    # ---- what torch.distributed calls, by its old and its new names

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Carried:
        own = self._rank if source.data_ptr() == output.data_ptr() + self._rank * source.nbytes else None
        return self._carry("gather", output, output, source, own)

    def alltoall_base(
        self, output: torch.Tensor, source: torch.Tensor, out_sizes: Any, in_sizes: Any, opts: Any = None
    ) -> Carried:
        """Every rank sends to this one what this one sends to itself: its own interval, with the padding.

        With sizes, parts are as different as the ranks: what arrives is as much of what is sent, then zeros.
        """
        if out_sizes:
            common = min(output.numel(), source.numel())
            output[common:].zero_()
            larger = output if output.numel() > source.numel() else source
            return self._carry("all-to-all", larger, output[:common], source[:common], None)
        return self._carry("all-to-all", source, output, self._own_part(source), None)

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Carried:
        work = self._carry("reduce-scatter", source, output, self._own_part(source), None)
        return self._times_ranks(work, output, opts)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Carried:
        work = Carried(None, None, tensors)
        for tensor in tensors:
            work = self._carry("all-reduce", tensor, tensor, tensor, 0)
            work = self._times_ranks(work, tensor, opts)
        return work

    def _times_ranks(self, work: Carried, values: torch.Tensor, opts: Any) -> Carried:
        """All ranks send the same values: a sum is these times the ranks, a mean or maximum is these."""
        if opts is not None and opts.reduceOp == ReduceOp.SUM:
            work.after = partial(values.mul_, self._placement.ranks)
        return work

    def allgather(
        self, outputs: list[list[torch.Tensor]], sources: list[torch.Tensor], opts: Any = None
    ) -> Carried:
        for places, source in zip(outputs, sources, strict=True):
            for place in places:
                place.copy_(source)
        return Carried(None, None, outputs)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Carried:
        return Carried(None, None, tensors)

    def barrier(self, opts: Any = None) -> Carried:
        return Carried(None, None, None)

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base


@contextmanager
def joined(cluster: Cluster) -> Iterator[Cluster]:
    """This process is `cluster.rank` of the cluster until the block ends."""
    if distributed.is_initialized():
        raise StateError(
            "this process is in a group of ranks already",
            "Simulate in a process of its own, without torchrun.",
        )

    def create(request: Any, _: Any) -> SimulatedGroup:
        members = list(request.global_ranks_in_group) or list(range(request.group_size))
        return SimulatedGroup(cluster, request.group_rank, members, request.group_id)

    distributed.Backend._plugins.pop(BACKEND.upper(), None)
    if BACKEND in distributed.Backend.backend_list:
        distributed.Backend.backend_list.remove(BACKEND)
    distributed.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
    distributed.init_process_group(
        BACKEND, store=HashStore(), rank=cluster.rank, world_size=cluster.network.ranks
    )
    # An object is preceded by its size, from a rank that is not there: the receiver keeps its own object.
    broadcast_object_list = distributed.broadcast_object_list
    vars(distributed)["broadcast_object_list"] = lambda *_, **__: None
    try:
        yield cluster
    finally:
        vars(distributed)["broadcast_object_list"] = broadcast_object_list
        distributed.destroy_process_group()
        report_errors_as(0)
