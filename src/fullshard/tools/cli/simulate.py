"""`fullshard simulate`."""

from __future__ import annotations

import json as _json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullshard.byte_sizes import parse_size
from fullshard.environment import compute_device, set_default_variables
from fullshard.errors import OptionError
from fullshard.option_table import TABLE
from fullshard.tools.cli.commands import Command
from fullshard.tools.cli.printing import table
from fullshard.tools.cli.shared import (
    CLUSTER,
    OFFLOAD,
    TRAINING,
    AsJson,
    CheckpointActivations,
    HostLink,
    Listing,
    NodeRanks,
    OffloadActivations,
    Ranks,
)
from fullshard.tools.cli.shared import (
    precision as precision_option,
)
from fullshard.tools.cli.values import choice, one_of

if TYPE_CHECKING:
    import torch

    from fullshard.planning.network import Network
    from fullshard.tools.simulation.run import Result, Scenario
    from fullshard.tools.simulation.timeline import Timeline

_MEASURING = "Measuring"
_INSIDE_LATENCY = "3.4us"


@dataclass(frozen=True)
class _Cluster:
    """The network as given on the command line."""

    ranks: int
    link: str
    latency: str
    node_ranks: int | None
    inside: str | None
    inside_latency: str
    rings: bool

    def network(self) -> Network:
        from fullshard.planning.network import Link, Network, bandwidth, duration

        link, inside = Link(bandwidth(self.link), duration(self.latency)), None
        if self.inside is not None:
            inside = Link(bandwidth(self.inside), duration(self.inside_latency))
        return Network(self.ranks, link, self.node_ranks, inside, self.rings)


def _simulate(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A preset, FILE.py:FUNCTION or package.module:FUNCTION that returns (model, batch).",
        ),
    ] = None,
    presets: Listing = False,
    ranks: Ranks = 8,
    rank: Annotated[
        int, typer.Option("--rank", metavar="R", help="The rank that runs here.", rich_help_panel=CLUSTER)
    ] = 0,
    link: Annotated[
        str,
        typer.Option(
            "--link",
            metavar="RATE",
            help="Bandwidth per rank, one way: 50GB/s or 400Gb/s.",
            rich_help_panel=CLUSTER,
        ),
    ] = "50GB/s",
    latency: Annotated[
        str,
        typer.Option("--latency", metavar="TIME", help="Latency of a hop.", rich_help_panel=CLUSTER),
    ] = "14us",
    node_ranks: NodeRanks = None,
    inside: Annotated[
        str | None,
        typer.Option(
            "--inside", metavar="RATE", help="Two levels: bandwidth inside a node.", rich_help_panel=CLUSTER
        ),
    ] = None,
    inside_latency: Annotated[
        str,
        typer.Option(
            "--inside-latency",
            metavar="TIME",
            help="Latency of a hop inside a node.",
            rich_help_panel=CLUSTER,
        ),
    ] = _INSIDE_LATENCY,
    rings: Annotated[
        bool,
        typer.Option(
            "--rings",
            help="Flat collectives over nodes send what NCCL's rings send, not the least.",
            rich_help_panel=CLUSTER,
        ),
    ] = False,
    layers: Annotated[
        int | None,
        typer.Option("--layers", metavar="N", help="Blocks of a preset (all).", rich_help_panel=TRAINING),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            metavar="N",
            help="Tokens per rank and step (4096; on a CPU 256).",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    strategy: Annotated[
        str,
        choice("strategy", TRAINING),
    ] = TABLE["strategy"].default,
    reduce: Annotated[
        str,
        choice("reduce", TRAINING),
    ] = TABLE["reduce"].default,
    precision: Annotated[
        str | None,
        precision_option(("fp32", "bf16", "fp16", "int8", "int8-across"), "Precision (bf16; on a CPU fp32)."),
    ] = None,
    checkpoint_activations: CheckpointActivations = False,
    offload_activations: OffloadActivations = False,
    keep_full: Annotated[
        str | None,
        typer.Option(
            "--keep-full",
            metavar="SIZE",
            help="Budget of units kept full: 2GiB, 'all', or 0.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    keep_node: Annotated[
        str | None,
        typer.Option(
            "--keep-node",
            metavar="SIZE",
            help="Budget of the node's share of values kept for backward: 2GiB, 'all', or 0.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile each block.", rich_help_panel=TRAINING)
    ] = False,
    offload: Annotated[
        str | None,
        typer.Option(
            "--offload",
            metavar="host|optimizer|auto",
            callback=one_of("--offload", ("host", "optimizer", "auto")),
            help="What rests in host memory.",
            rich_help_panel=OFFLOAD,
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            "--host-memory",
            metavar="SIZE",
            help="Memory of one node, which its ranks share (--node-ranks; without it all).",
            rich_help_panel=OFFLOAD,
        ),
    ] = None,
    host_link: HostLink = None,
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            metavar="fullshard|fsdp2|both",
            callback=one_of("--engine", ("fullshard", "fsdp2", "both")),
            help="Which engine trains.",
            rich_help_panel=_MEASURING,
        ),
    ] = "fullshard",
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", help="Measured steps.", rich_help_panel=_MEASURING)
    ] = 8,
    warmup: Annotated[
        int | None,
        typer.Option(
            "--warmup", metavar="N", help="Steps before those (3; compiled 10).", rich_help_panel=_MEASURING
        ),
    ] = None,
    multiprocessors: Annotated[
        int,
        typer.Option(
            "--multiprocessors",
            metavar="N",
            help="GPU: how many a message takes from compute while it lasts, as NCCL's kernels do (0).",
            rich_help_panel=_MEASURING,
        ),
    ] = 0,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="cpu, cuda, cuda:1 (a GPU if there is one).",
            rich_help_panel=_MEASURING,
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline",
            metavar="FILE.json",
            help="Trace one step, for Perfetto.",
            rich_help_panel=_MEASURING,
        ),
    ] = None,
    json: AsJson = False,
) -> int:
    if presets:
        return _list()
    if model is None:
        raise OptionError("no model was given", "Pass one; fullshard simulate --list shows the presets.")
    from fullshard.planning.network import bandwidth
    from fullshard.tools.simulation.models import subject
    from fullshard.tools.simulation.run import Scenario

    if reduce == "fixed":
        raise OptionError(
            "--reduce fixed needs the micro-batches of fs.Batches, and a simulated step has one batch",
            "Simulate --reduce exchange, which sends the same bytes per micro-batch.",
        )
    where = _device(device)
    if inside is None and node_ranks is None:
        _refuse_without_nodes(
            {
                "--inside-latency": inside_latency != _INSIDE_LATENCY,
                "--rings": rings,
                "--keep-node": keep_node is not None,
            }
        )
    network = _Cluster(ranks, link, latency, node_ranks, inside, inside_latency, rings).network()
    if not 0 <= rank < ranks:
        raise OptionError(f"rank {rank} of {ranks} ranks", "Ranks are numbered from 0.")
    default_tokens, default_precision = (4096, "bf16") if where.type == "cuda" else (256, "fp32")
    scenario = Scenario(
        what=subject(model, layers, default_tokens if tokens is None else tokens),
        network=network,
        device=where,
        rank=rank,
        strategy=strategy,
        reduce=reduce,
        precision=precision or default_precision,
        checkpoint_activations="offload" if offload_activations else checkpoint_activations,
        keep_full=_budget("--keep-full", keep_full),
        keep_node=_budget("--keep-node", keep_node),
        compiled=compiled,
        offload=offload,
        host_memory_bytes=_host_memory(host_memory),
        host_link_bytes_s=None if host_link is None else bandwidth(host_link),
        multiprocessors=multiprocessors,
        warmup=(10 if compiled else 3) if warmup is None else warmup,
        steps=steps,
    )
    return _measured(scenario, engine, timeline, json)


def _refuse_without_nodes(given: dict[str, bool]) -> None:
    for name, is_given in given.items():
        if is_given:
            raise OptionError(
                f"{name} is about nodes, and the network is flat",
                "Give --node-ranks and --inside as well, or leave it out.",
            )


def _presets() -> list[str]:
    from fullshard.tools.simulation.presets import PRESETS

    return list(PRESETS)


def _list() -> int:
    from fullshard.tools.simulation.presets import PRESETS, describe

    rows = [(name, *describe(shape).split(", ", 1)) for name, shape in PRESETS.items()]
    table(("preset", "size", "shape"), rows, left=(0, 2))
    return 0


def _measured(scenario: Scenario, engine: str, file: Path | None, as_json: bool) -> int:
    from fullshard.tools.simulation import report
    from fullshard.tools.simulation.run import ENGINES
    from fullshard.tools.simulation.timeline import Timeline

    engines = ENGINES if engine == "both" else (engine,)
    timeline = Timeline() if file is not None else None
    if file is not None and not file.resolve().parent.is_dir():
        raise OptionError(f"there is no folder {str(file.parent)!r}", "Create it, or name another file.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its internals; ours are errors
        results = [simulate(scenario, engine, timeline) for engine in engines]
    if as_json:
        print(_json.dumps(report.as_json(scenario, results), indent=1))
    else:
        print(f"{report.title(scenario)}\n\n{report.table(results)}")
    if timeline is not None and file is not None:
        timeline.write(file)
        if not as_json:
            print(f"\nTimeline: {file} (open it at https://ui.perfetto.dev)")
    return 1 if any(result.figures is None for result in results) else 0


def simulate(scenario: Scenario, engine: str, timeline: Timeline | None) -> Result:
    from fullshard.tools.simulation import run

    return run.simulate(scenario, engine, timeline)


def _device(name: str | None) -> torch.device:
    import torch

    # Each group of ranks has a stream of its own: with CUDA's 8 queues some would share one, and wait in it.
    set_default_variables({"CUDA_DEVICE_MAX_CONNECTIONS": "32"})
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise OptionError(f"there is no device {name!r}", "Choose cpu, cuda or cuda:N.") from None
    usable = device.type == "cpu" or (
        device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()
    )
    if not usable:
        raise OptionError(f"device {name!r} cannot be used here", "Choose cpu, or a GPU of this machine.")
    device = compute_device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _host_memory(text: str | None) -> int | None:
    return None if text is None else parse_size(text, "--host-memory", "Write it as 512GiB or 2TB.")


def _budget(option: str, text: str | None) -> int | str | None:
    if text is None or text == "all":
        return text
    return parse_size(text, option, "Write it as 2GiB, 500MiB, 'all' or 0.")


SIMULATE = Command(
    "simulate",
    _simulate,
    "train on one rank of a simulated cluster",
    """\
One device runs as one rank of many. Collectives deliver plausible data and occupy the
links that they use for bytes / bandwidth; everything else is real.""",
    """\
examples:
  fullshard simulate --list
  fullshard simulate llama-8b --layers 8 --ranks 64 --link 50GB/s --engine both
  fullshard simulate my_model.py:make --ranks 16 --json
  fullshard simulate llama-8b --layers 8 --ranks 8 --offload host --host-link 25GB/s

Exit code 0: done; 1: the rank does not fit in memory; 2: invalid request.""",
    names=_presets,
)
