"""The command line: `fullshard simulate MODEL --ranks 64 --link 50GB/s`."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from fullshard.errors import FullshardError, OptionError
from fullshard.options import ACROSS, REDUCE, STRATEGIES
from fullshard.simulation import report
from fullshard.simulation.models import PRESETS, describe, subject
from fullshard.simulation.network import Link, Network, bandwidth, duration
from fullshard.simulation.run import ENGINES, PRECISIONS, Scenario, simulate
from fullshard.simulation.timeline import Timeline
from fullshard.world import compute_device

_SIZES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as the package's errors do."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(message, f"See {self.prog} --help.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: done; 1: the rank does not fit in memory; 2: something is wrong with what was asked."""
    try:
        args = _parser().parse_args(arguments)
        if args.list:
            print("\n".join(f"{name:<10} {describe(shape)}" for name, shape in PRESETS.items()))
            return 0
        return _simulate(args)
    except FullshardError as error:
        print(f"fullshard: {error.what.rstrip('.')}. {error.remedy}".rstrip(), file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fullshard", description="Fully sharded data parallel training for PyTorch.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    said = commands.add_parser(
        "simulate",
        help="train on one rank of a cluster that is described, not there",
        description="One device plays one rank of many. Collectives deliver plausible data and hold one wire "
        "for latency + bytes / bandwidth; everything else is real.",
    )
    said.add_argument(
        "model", nargs="?", metavar="MODEL", help="a preset, FILE.py:FUNCTION or package.module:FUNCTION "
        "that returns (model, batch)",
    )  # fmt: skip
    said.add_argument("--list", action="store_true", help="list the presets and exit")
    cluster = said.add_argument_group("the cluster")
    cluster.add_argument("--ranks", type=int, default=8, metavar="N", help="ranks (8)")
    cluster.add_argument("--rank", type=int, default=0, metavar="R", help="the rank that is played (0)")
    cluster.add_argument(
        "--link", default="50GB/s", metavar="RATE", help="of each rank, one way: 50GB/s or 400Gb/s (50GB/s)"
    )
    cluster.add_argument("--latency", default="20us", metavar="TIME", help="of a collective (20us)")
    cluster.add_argument("--node-ranks", type=int, metavar="N", help="two levels: ranks of one node")
    cluster.add_argument("--inside", metavar="RATE", help="two levels: a rank's link inside its node")
    training = said.add_argument_group("the training")
    training.add_argument("--layers", type=int, metavar="N", help="blocks of a preset (all)")
    training.add_argument("--tokens", type=int, metavar="N", help="a rank and step (4096; on a CPU 256)")
    training.add_argument("--strategy", default="zero3", choices=STRATEGIES)
    training.add_argument("--across", default="replicate", choices=ACROSS, help="of hybrid, between nodes")
    training.add_argument("--reduce", default="auto", choices=REDUCE, help="how gradients are sent (auto)")
    training.add_argument("--precision", choices=list(PRECISIONS), help="(bf16; on a CPU fp32)")
    training.add_argument("--checkpoint-activations", action="store_true")
    training.add_argument(
        "--keep-full", metavar="SIZE", help="full values kept for backward: 2GiB, 'all', 0 for none"
    )
    training.add_argument("--compile", action="store_true", help="compile each block")
    measuring = said.add_argument_group("measuring")
    measuring.add_argument("--engine", default="fullshard", choices=[*ENGINES, "both"])
    measuring.add_argument("--steps", type=int, default=8, metavar="N", help="measured steps (8)")
    measuring.add_argument("--warmup", type=int, metavar="N", help="steps before them (3; compiled 10)")
    measuring.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 (a GPU if there is one)")
    measuring.add_argument("--timeline", type=Path, metavar="FILE.json", help="trace one step, for Perfetto")
    measuring.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _simulate(args: argparse.Namespace) -> int:
    scenario = _scenario(args)
    engines = ENGINES if args.engine == "both" else (args.engine,)
    timeline = Timeline() if args.timeline is not None else None
    if timeline is not None and not args.timeline.resolve().parent.is_dir():
        raise OptionError(
            f"there is no folder {str(args.timeline.parent)!r}", "Write the timeline elsewhere."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its internals; ours are errors
        results = [simulate(scenario, engine, timeline) for engine in engines]
    if args.json:
        print(json.dumps(report.as_json(scenario, results), indent=1))
    else:
        print(f"{report.title(scenario)}\n\n{report.table(results)}")
    if timeline is not None:
        timeline.write(args.timeline)
        if not args.json:
            print(f"\nTimeline: {args.timeline} (open it at https://ui.perfetto.dev)")
    return 1 if any(result.figures is None for result in results) else 0


def _scenario(args: argparse.Namespace) -> Scenario:
    if args.model is None:
        raise OptionError("no model was named", "Give one; fullshard simulate --list shows the presets.")
    device = _device(args.device)
    latency = duration(args.latency)
    inside = None if args.inside is None else Link(bandwidth(args.inside), latency)
    network = Network(args.ranks, Link(bandwidth(args.link), latency), args.node_ranks, inside)
    if not 0 <= args.rank < args.ranks:
        raise OptionError(f"rank {args.rank} of {args.ranks} ranks", "Ranks count from 0.")
    tokens, precision = (4096, "bf16") if device.type == "cuda" else (256, "fp32")
    tokens = tokens if args.tokens is None else args.tokens
    return Scenario(
        what=subject(args.model, args.layers, tokens),
        network=network,
        device=device,
        rank=args.rank,
        strategy=args.strategy,
        across=args.across,
        reduce=args.reduce,
        precision=args.precision or precision,
        checkpoint_activations=args.checkpoint_activations,
        keep_full=_keep_full(args.keep_full),
        compiled=args.compile,
        warmup=(10 if args.compile else 3) if args.warmup is None else args.warmup,
        steps=args.steps,
    )


def _device(name: str | None) -> torch.device:
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


def _keep_full(text: str | None) -> int | str | None:
    if text is None or text == "all":
        return text
    number, factor = text, 1
    for suffix, bytes_each in _SIZES.items():
        if text.endswith(suffix):
            number, factor = text.removesuffix(suffix), bytes_each
    try:
        return round(float(number) * factor)
    except ValueError:
        raise OptionError(f"--keep-full is {text!r}", "Write it as 2GiB, 500MiB, 'all' or 0.") from None
