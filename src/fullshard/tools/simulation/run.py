"""One scenario from its description to its figures: build, shard, measure, trace."""

from __future__ import annotations

import gc
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.api import plan, shard
from fullshard.environment import compute_device, return_memory_to_system
from fullshard.errors import FullshardError, OptionError
from fullshard.offload import PRESETS as OFFLOADS
from fullshard.offload import Offload
from fullshard.option_table import CheckpointActivations
from fullshard.options import parse
from fullshard.plan.plan import Plan
from fullshard.planning.network import Network
from fullshard.planning.transfers import Rates
from fullshard.precision import PRESETS, Precision
from fullshard.tools.simulation.group import Cluster, joined
from fullshard.tools.simulation.host_link import LinkFigures, measured_rates, over_link, refuse_faster
from fullshard.tools.simulation.measure import Figures, measure
from fullshard.tools.simulation.models import Subject, Training, blocks_of
from fullshard.tools.simulation.timeline import Timeline, trace

ENGINES = ("fullshard", "fsdp2")
PRECISIONS = {
    **PRESETS,
    "int8": Precision(compute=torch.bfloat16, gather=torch.int8, wire=torch.int8),
    "int8-across": Precision(compute=torch.bfloat16, across=torch.int8),
}


@dataclass(frozen=True)
class Scenario:
    """A model, the cluster it is trained on, and how."""

    what: Subject
    network: Network
    device: torch.device
    rank: int = 0
    strategy: str = "zero3"
    reduce: str = "auto"
    precision: str = "bf16"
    checkpoint_activations: CheckpointActivations = False
    keep_full: int | str | None = None
    keep_node: int | str | None = None
    merge_units: int | None = None
    compiled: bool = False
    offload: str | None = None
    host_memory_bytes: int | None = None  # of a node, which its ranks share
    host_link_bytes_s: float | None = None  # None: this machine's own
    multiprocessors: int = 0  # that a message takes from compute, on a GPU
    warmup: int = 3
    steps: int = 8

    def __post_init__(self) -> None:
        if self.multiprocessors < 0 or (self.multiprocessors and self.device.type != "cuda"):
            raise OptionError(
                f"messages that take {self.multiprocessors} multiprocessors of {self.device}",
                "Give --multiprocessors on a GPU only, and at least 0.",
            )
        if self.offload is None and (self.host_memory_bytes or self.host_link_bytes_s):
            raise OptionError("--host-memory and --host-link are for --offload", "Give --offload host.")
        if self.precision not in PRECISIONS:
            raise OptionError(
                f"unknown precision {self.precision!r}", f"Choose one of {', '.join(map(repr, PRECISIONS))}."
            )
        if self.steps < 1 or self.warmup < 1:
            raise OptionError(
                f"{self.warmup} steps of warm-up and {self.steps} measured ones", "Give at least 1 of each."
            )
        if self.strategy == "hybrid" and self.network.node_ranks is None:
            raise OptionError(
                "strategy 'hybrid' shards inside a node, and this network is flat",
                "Give --node-ranks and --inside.",
            )
        names = ("strategy", "reduce", "keep_full", "keep_node", "merge_units")
        parse(**{name: getattr(self, name) for name in names})

    @property
    def host_ranks(self) -> int:
        return self.network.node_ranks or self.network.ranks

    def offload_option(self) -> Offload | None:
        """For the rank that runs here, with its share of the node's memory."""
        if self.offload is None:
            return None
        given = OFFLOADS[self.offload]
        if self.host_memory_bytes is None:
            return given
        return replace(given, host=self.host_memory_bytes // self.host_ranks)

    def mesh(self, strategy: str) -> DeviceMesh:
        """All ranks; with hybrid one row per node, as torchrun numbers them."""
        ranks, inner = self.network.ranks, self.network.node_ranks
        if strategy != "hybrid" or inner is None:
            return init_device_mesh(self.device.type, (ranks,))
        grid, names = (ranks // inner, inner), ("replicate", "shard")
        return init_device_mesh(self.device.type, grid, mesh_dim_names=names)


@dataclass(frozen=True)
class Result:
    """The figures of one engine. A rank that does not fit in the device's memory has no figures."""

    engine: str
    figures: Figures | None
    plan: Plan | None  # fullshard's
    resident_bytes: int  # the process at its peak, on a CPU
    link: LinkFigures | None = None  # with offload
    host_bytes: int = 0  # of all ranks of a node, at rest by plan


def simulate(scenario: Scenario, engine: str, timeline: Timeline | None = None) -> Result:
    """Train on one rank of the simulated cluster. In a process that is in no group of ranks."""
    cluster = Cluster(scenario.network, scenario.device, scenario.rank, scenario.multiprocessors)
    with joined(cluster):
        result = _measured(scenario, engine, cluster, timeline)
    gc.collect()
    return_memory_to_system()
    if scenario.device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def _measured(scenario: Scenario, engine: str, cluster: Cluster, timeline: Timeline | None) -> Result:
    planned: Plan | None = None
    own = Rates()
    if scenario.offload is not None:
        if engine != "fullshard":
            raise OptionError(f"--offload with --engine {engine}", "It is for fullshard: leave out --engine.")
        own = measured_rates(scenario.device)
        refuse_faster(scenario.host_link_bytes_s, own)
    _forget_peak()
    try:
        training = build(scenario, engine)
        planned = plan(training.model) if engine == "fullshard" else None
        figures = measure(training, cluster, scenario.warmup, scenario.steps)
        if timeline is not None:
            timeline.add(engine, trace(training, cluster))
    except torch.OutOfMemoryError:
        return Result(engine, None, planned, 0)
    except FullshardError as error:
        if isinstance(error.__cause__, torch.OutOfMemoryError):
            return Result(engine, None, planned, 0)
        raise
    resident = _peak_resident() if scenario.device.type == "cpu" else 0
    if planned is None or planned.resting is None:
        return Result(engine, figures, planned, resident)
    link = over_link(planned, figures.step_s, own, scenario.host_link_bytes_s)
    return Result(
        engine, figures, planned, resident, link, planned.resting.bytes_at("host") * scenario.host_ranks
    )


def build(scenario: Scenario, engine: str) -> Training:
    """The scenario's model, sharded by `engine`, ready to step."""
    what, device = scenario.what, scenario.device
    torch.manual_seed(0)
    if what.initialize is None:
        model = what.build()
        if not any(parameter.is_meta for parameter in model.parameters()):
            model.to(device)
    else:
        # On meta where it can be: 70B parameters fit on no device before they are sharded.
        on_meta = compute_device(torch.device("meta")) == device
        with torch.device("meta") if on_meta else device:
            model = what.build()
    blocks = _fullshard(scenario, model) if engine == "fullshard" else _fsdp2(scenario, model)
    return Training(model, blocks, what, what.batch(device))


def _fullshard(scenario: Scenario, model: nn.Module) -> list[nn.Module]:
    blocks = blocks_of(model)
    hybrid = scenario.strategy == "hybrid"
    if scenario.host_memory_bytes is not None:
        _refuse_small_host(scenario, model)
    shard(
        model,
        strategy=scenario.strategy,
        mesh=scenario.mesh("hybrid") if hybrid else None,
        keep_node=scenario.keep_node,
        reduce=scenario.reduce,
        precision=PRECISIONS[scenario.precision],
        checkpoint_activations=scenario.checkpoint_activations,
        keep_full=scenario.keep_full,
        merge_units=scenario.merge_units,
        offload=scenario.offload_option(),
        materialize=scenario.what.initialize,
    )
    if scenario.compiled:
        for block in blocks:
            block.compile()
    return blocks


def _refuse_small_host(scenario: Scenario, model: nn.Module) -> None:
    """The error of a node whose ranks share too little memory; sharding knows the share of one rank alone."""
    assert scenario.offload is not None
    plan(
        model,
        ranks=scenario.host_ranks if scenario.strategy == "hybrid" else scenario.network.ranks,
        node_ranks=scenario.host_ranks,
        strategy=scenario.strategy,
        precision=PRECISIONS[scenario.precision],
        keep_full=scenario.keep_full,
        keep_node=scenario.keep_node,
        merge_units=scenario.merge_units,
        offload=replace(OFFLOADS[scenario.offload], host=scenario.host_memory_bytes),
    )


def _fsdp2(scenario: Scenario, model: nn.Module) -> list[nn.Module]:
    from fullshard.tools.simulation import rivals

    precision = PRECISIONS[scenario.precision]
    blocks = rivals.fsdp2(
        model,
        scenario.mesh(scenario.strategy),
        strategy=scenario.strategy,
        compute=precision.compute,
        reduce=rivals.reduce_dtype(precision),
        checkpoint_activations=bool(scenario.checkpoint_activations),
        compiled=scenario.compiled,
    )
    rivals.materialize(model, scenario.what, scenario.device)
    return blocks


def _forget_peak() -> None:
    """Linux: the peak of resident memory counts from here."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_resident() -> int:
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    return 0
