"""`fullshard env`: versions and devices for a bug report."""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from fullshard.environment import cores, launch
from fullshard.extras import TRIED
from fullshard.link_speeds import (
    ClusterSpeeds,
    LinkSpeed,
    recall_rates,
    recall_speeds,
    remember_rates,
    remember_speeds,
)
from fullshard.tools.cli.commands import Command
from fullshard.tools.cli.printing import as_json_text, table
from fullshard.tools.cli.shared import AsJson
from fullshard.version import VERSION

_OTHERS = ("numpy", "safetensors", "peft", "isal", "typer", "rich", "onnx", "onnxruntime", "onnxscript")


def _machine(
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Measure the links between the ranks that a launcher started, and remember them.",
        ),
    ] = False,
    rates: Annotated[
        bool,
        typer.Option(
            "--rates",
            help="Measure how fast this device computes, in seconds, and remember it for plans.",
        ),
    ] = False,
    json: AsJson = False,
) -> int:
    speeds = _probed() if probe else recall_speeds()
    if probe and launch().rank != 0:
        return 0
    measured = _measured() if rates else recall_rates()
    facts = _facts()
    if json:
        links = {"links": None if speeds is None else asdict(speeds)}
        as_json_text(facts | links | {"rates": measured})
        return 0
    rows = [(name, str(value)) for name, value in facts.items() if name != "libraries"]
    rows += _links(speeds)
    rows += _rates(measured)
    rows += [(name, _library(state)) for name, state in facts["libraries"].items()]
    table(("what", "here"), rows, left=(0, 1))
    return 0


def _probed() -> ClusterSpeeds:
    """Measured by all ranks; the first one remembers it."""
    from fullshard.comm.probe import probe

    speeds = probe()
    if launch().rank == 0 and (speeds.inside or speeds.across):
        remember_speeds(speeds)
    return speeds


def _measured() -> dict[str, Any]:
    """Rates of this process's device, remembered."""
    import torch

    from fullshard.planning.machines import as_values
    from fullshard.planning.rates import measured

    values = as_values(measured(torch.device("cuda" if torch.cuda.is_available() else "cpu")))
    remember_rates(values)
    return values


def _rates(values: dict[str, Any] | None) -> list[tuple[str, str]]:
    if values is None:
        return [("rates", "not measured: run fullshard env --rates")]
    device = values["device"]
    best = max(flop_s for *_, flop_s in device["products"])
    memory, step = device["memory_bytes_s"] / 1e9, device["optimizer_bytes_s"] / 1e9
    return [
        ("matrix products, 16 bits", f"up to {best / 1e12:.3g} TFLOP/s"),
        ("attention, forward", f"{device['attention_flop_s'] / 1e12:.3g} TFLOP/s"),
        ("memory", f"{memory:.3g} GB/s, in an optimizer's step {step:.3g}"),
        ("link to host memory", f"{values['host']['link_one_way'] / 1e9:.3g} GB/s"),
    ]


def _links(speeds: ClusterSpeeds | None) -> list[tuple[str, str]]:
    if speeds is None:
        return [("links", "not measured: run fullshard env --probe on several ranks")]
    if speeds.inside is None and speeds.across is None:
        return [("links", "none between one rank: launch several, see fullshard env --help")]
    known = (("link inside a node", speeds.inside), ("link across nodes", speeds.across))
    rows = [(name, _link(level)) for name, level in known if level is not None]
    return [*rows, ("links measured", f"{speeds.measured}, {speeds.ranks} ranks, {speeds.backend}")]


def _link(speed: LinkSpeed) -> str:
    rate = f"{speed.bandwidth_bytes_s / 1e9:.3g} GB/s per rank"
    return f"{rate}, {speed.latency_s * 1e6:.3g} µs per hop, {speed.ranks} ranks"


def _facts() -> dict[str, Any]:
    import torch

    backends = torch.distributed
    available = {
        "gloo": backends.is_gloo_available(),
        "nccl": backends.is_nccl_available(),
        "mpi": backends.is_mpi_available(),
    }
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "fullshard": VERSION,
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda,
        "backends": ", ".join(name for name, there in available.items() if there) or "none",
        "devices": ", ".join(f"{one.name} ({one.total_memory / 2**30:.0f} GiB)" for one in devices) or "CPU",
        "cores": cores(),
        "libraries": {name: _library_state(name) for name in (*TRIED, *_OTHERS)},
    }


def _library_state(name: str) -> dict[str, Any]:
    try:
        installed: str | None = version(name)
    except PackageNotFoundError:
        installed = None
    tested = TRIED.get(name)
    known = None if tested is None or installed is None else ".".join(installed.split(".")[:2]) in tested
    return {"version": installed, "tried": known, "tested_with": None if tested is None else list(tested)}


def _library(state: dict[str, Any]) -> str:
    if state["version"] is None:
        return "not installed"
    if state["tried"] is False:
        return f"{state['version']}, NOT TRIED: tests run with {' or '.join(state['tested_with'])}"
    return str(state["version"])


MACHINE = Command(
    "env",
    _machine,
    "print versions and devices, for a bug report",
    """\
Versions of fullshard, Python, torch and the libraries that integrations are tested with;
backends and devices. The output contains no path and no host name. With --probe the ranks
that a launcher started measure bandwidth and latency inside a node and across nodes, in
seconds; the result is remembered for this cluster (FULLSHARD_CLUSTER, or the host's name
without its numbers) in the user's cache folder. With --rates this process measures its
device: matrix products by shape, attention, memory, the optimizer's step and the link to
host memory. Plans, and fs.shard(model, plan="auto"), read both.""",
    """\
examples:
  fullshard env
  fullshard env --json
  fullshard env --rates
  torchrun --nproc-per-node 8 -m fullshard env --probe
  fullshard launch --nnodes 2 --node-rank 0 --master-addr HOST -m fullshard env --probe

Exit code 0.""",
)
