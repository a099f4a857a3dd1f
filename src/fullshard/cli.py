"""The command line: `fullshard simulate MODEL ...`, `fullshard inspect|verify|export CHECKPOINT ...`.

What a command needs is imported when it is asked for, so that looking at a checkpoint does not load the
simulation.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from fullshard.checkpoint.commands import Damaged, Progress, Report, quiet
from fullshard.errors import FullshardError, OptionError
from fullshard.options import ACROSS, REDUCE, STRATEGIES
from fullshard.world import compute_device

if TYPE_CHECKING:
    from fullshard.simulation.run import Result, Scenario
    from fullshard.simulation.timeline import Timeline

_SIZES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as the package's errors do."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(message, f"See {self.prog} --help.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: done; 2: something is wrong with what was asked.

    1: the simulated rank does not fit in memory, or the checkpoint is damaged.
    """
    said = sys.argv[1:] if arguments is None else list(arguments)
    try:
        args = _parser(said).parse_args(said)
        code: int = args.run(args)
        sys.stdout.flush()  # so that a reader who has gone away is noticed here
        return code
    except FullshardError as error:
        print(f"fullshard: {error.what.rstrip('.')}. {error.remedy}".rstrip(), file=sys.stderr)
        return 1 if isinstance(error, Damaged) else 2
    except BrokenPipeError:  # `fullshard inspect ... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("fullshard: interrupted", file=sys.stderr)
        return 130


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """All commands, but the options of the one that is named: they may need imports."""
    parser = _Parser(
        prog="fullshard",
        description="Fully sharded data parallel training for PyTorch.",
        epilog="`fullshard COMMAND --help` says what a command does, with examples.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    named = next((word for word in arguments if not word.startswith("-")), None)
    for name, (summary, add_options) in _COMMANDS.items():
        one = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == named:
            add_options(one)
    return parser


def _size(text: str, option: str, remedy: str) -> int:
    number, factor = text.strip(), 1
    for suffix, bytes_each in _SIZES.items():
        if number.endswith(suffix):
            number, factor = number.removesuffix(suffix), bytes_each
            break
    try:
        return round(float(number) * factor)
    except (ValueError, OverflowError):
        raise OptionError(f"{option} is {text!r}", remedy) from None


# ---- checkpoints


def _inspect_options(said: argparse.ArgumentParser) -> None:
    said.description = """\
Say what is at PATH, from manifest and headers alone; no tensor is read. PATH may be
  a folder that fs.save wrote  when, by what, on how many ranks; tensors, optimizer,
                               extra values, files
  a folder of such folders     each with its step, time and size; complete or not;
                               the newest is marked
  a Hugging Face model         a folder, or one safetensors file
  a DCP folder                 of torch.distributed.checkpoint"""
    said.epilog = """\
examples:
  fullshard inspect runs/gpt                      which checkpoints are there
  fullshard inspect runs/gpt/step-300 --tensors   every tensor with its dtype and shape
  fullshard inspect runs/gpt/step-300 --json | jq .extra.step

Exit code 0: fine; 1: damaged or not finished; 2: PATH is none of these."""
    said.add_argument("path", type=Path, metavar="PATH")
    said.add_argument("--tensors", action="store_true", help="list every tensor with its dtype and shape")
    said.add_argument("--json", action="store_true", help="print JSON instead of text")
    said.set_defaults(run=_inspect)


def _inspect(args: argparse.Namespace) -> int:
    from fullshard.checkpoint.inspecting import inspect

    return _answer(inspect(args.path, args.tensors), args.json)


def _verify_options(said: argparse.ArgumentParser) -> None:
    said.description = """\
Read every byte of a checkpoint and compare it with the checksums in its manifest. Every
damaged place is listed with its file, its bytes and the tensors that lie there. Memory
stays small, whatever the size.

fs.load checks what it reads by itself: this is for a checkpoint that was copied, or has
lain for long. A Hugging Face model or a DCP folder carries no checksums; of those the
form is checked."""
    said.epilog = """\
examples:
  fullshard verify runs/gpt/step-300
  fullshard verify runs/gpt/step-300 --json | jq -r '.damage[].tensors[]'

Exit code 0: sound; 1: damaged or not finished; 2: PATH is no checkpoint, or may not be read."""
    said.add_argument("path", type=Path, metavar="PATH")
    said.add_argument("--json", action="store_true", help="print JSON instead of text")
    said.set_defaults(run=_verify)


def _verify(args: argparse.Namespace) -> int:
    from fullshard.checkpoint.verifying import verify

    return _answer(verify(args.path, _progress("checked")), args.json)


def _export_options(said: argparse.ArgumentParser) -> None:
    from fullshard.checkpoint.export import DTYPES, FORMATS

    said.description = """\
Write the model of a checkpoint to a new folder: plain safetensors under the model's own
names, config.json and the like beside them, an index if there are several files.
`from_pretrained` loads it, and it can go to the hub as it is. The parts of a save with
files='parts' are put together. Every byte is checked on the way, tensors pass through a
piece at a time, and the folder appears only when it is complete.

It holds no optimizer. It does hold a manifest, so that `fullshard verify` works on it
wherever it was copied to; who edits config.json there removes fullshard.json."""
    said.epilog = """\
examples:
  fullshard export runs/gpt/step-300 --to gpt-final --dtype bf16
  fullshard export runs/gpt/step-300 --to gpt-dcp --format dcp

Exit code 0: done; 1: the checkpoint is damaged; 2: DIR is not empty, or cannot be written."""
    said.add_argument("path", type=Path, metavar="PATH", help="a folder that fs.save wrote")
    said.add_argument("--to", type=Path, required=True, metavar="DIR", help="a folder that is not there yet")
    said.add_argument("--dtype", choices=list(DTYPES), help="of floating point tensors (as stored)")
    said.add_argument("--format", choices=FORMATS, default="safetensors", help="(safetensors)")
    said.add_argument("--file-size", metavar="SIZE", help="of one safetensors file at most (5GB)")
    said.set_defaults(run=_export)


def _export(args: argparse.Namespace) -> int:
    from fullshard.checkpoint.export import DTYPES, Wish, export

    if args.format == "dcp" and (args.dtype or args.file_size):
        raise OptionError("--dtype and --file-size are for safetensors", "Leave them out with --format dcp.")
    wish = Wish(None if args.dtype is None else DTYPES[args.dtype], args.format)
    if args.file_size is not None:
        remedy = "Write it as 5GB or 500MiB."
        size = _size(args.file_size, "--file-size", remedy)
        if size < 1:
            raise OptionError(f"--file-size is {args.file_size!r}", remedy)
        wish = Wish(wish.dtype, wish.format, size)
    return _answer(export(args.path, args.to, wish, _progress("exported")), False)


def _answer(report: Report, as_json: bool) -> int:
    print(json.dumps(report.data, indent=1) if as_json else "\n".join(report.lines))
    return 1 if report.damaged else 0


def _progress(verb: str) -> Progress:
    """A line on a terminal that is overwritten as it changes; elsewhere nothing."""
    if not sys.stderr.isatty():
        return quiet
    begin = time.monotonic()
    shown = 0.0

    def show(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if done < total and now - shown < 0.2:
            return
        shown = now
        rate = done / max(now - begin, 1e-3) / 1e6
        line = f"{verb} {done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate:.0f} MB/s"
        print(f"\r{line:<60}" if done < total else f"\r{'':<60}\r", end="", file=sys.stderr, flush=True)

    return show


# ---- simulation


def _simulate_options(said: argparse.ArgumentParser) -> None:
    from fullshard.simulation.run import ENGINES, PRECISIONS

    said.description = """\
One device plays one rank of many. Collectives deliver plausible data and hold one wire
for latency + bytes / bandwidth; everything else is real."""
    said.epilog = """\
examples:
  fullshard simulate --list
  fullshard simulate llama-8b --layers 8 --ranks 64 --link 50GB/s --engine both

Exit code 0: done; 1: the rank does not fit in memory; 2: what was asked is wrong."""
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
    said.set_defaults(run=_simulate)


def simulate(scenario: Scenario, engine: str, timeline: Timeline | None) -> Result:
    from fullshard.simulation import run

    return run.simulate(scenario, engine, timeline)


def _simulate(args: argparse.Namespace) -> int:
    from fullshard.simulation import report
    from fullshard.simulation.models import PRESETS, describe
    from fullshard.simulation.run import ENGINES
    from fullshard.simulation.timeline import Timeline

    if args.list:
        print("\n".join(f"{name:<10} {describe(shape)}" for name, shape in PRESETS.items()))
        return 0
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
    from fullshard.simulation.models import subject
    from fullshard.simulation.network import Link, Network, bandwidth, duration
    from fullshard.simulation.run import Scenario

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
    return _size(text, "--keep-full", "Write it as 2GiB, 500MiB, 'all' or 0.")


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "simulate": ("train on one rank of a cluster that is described, not there", _simulate_options),
    "inspect": ("say what a checkpoint is and holds", _inspect_options),
    "verify": ("check every byte of a checkpoint", _verify_options),
    "export": ("write a checkpoint's model as plain safetensors, or for DCP", _export_options),
}
