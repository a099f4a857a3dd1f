"""A step over a slow link: fullshard beside DDP and FSDP2, two ranks on two nodes with a wire between them.

    make bench-link       (or: python bench/slow_link.py --rates 100mbit 1gbit --model small --steps 5)

Each rank runs in a network namespace of its own; a veth pair joins them, and the kernel (tc, token bucket)
lets each end send no faster than the rate. It takes root and iproute2. What the link really carries is timed
with a known transfer and printed. See bench/contenders.py for how the engines take turns; "MB sent" is what
the kernel counted on one rank's connections in one step.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from types import FrameType

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import contenders
import namespaces
import report
from contenders import MODELS, Result
from namespaces import Node

ENGINES = ("DDP", "FSDP2", "fullshard")
PORT = 29500  # free for certain: the namespaces are new
WARMUP = 1
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bits_per_s(rate: str) -> float:
    """As tc writes rates: "200mbit", "1gbit"."""
    number, unit = rate[:-4], rate[-4:]
    if unit not in UNITS or not number.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"{rate!r} is not a rate such as 200mbit or 1gbit")
    return float(number) * UNITS[unit]


# --- a rank -------------------------------------------------------------------------------------------


def rank_main(args: argparse.Namespace) -> None:
    """What a node runs: look at the link, then race; rank 0 leaves the results in a file."""
    address = f"tcp://{args.address}:{PORT}"
    contenders.join(args.rank, 2, address, local_rank=0, threads=1)
    carried = link_rate(bits_per_s(args.rates[0]))
    chosen = contenders.chosen(ENGINES, args.precisions)
    results = contenders.race(chosen, MODELS[args.model], args.steps, WARMUP)
    if args.rank == 0:
        torch.save((carried, results), args.reply)
    dist.barrier()
    dist.destroy_process_group()


def link_rate(promised: float) -> float:
    """Bits a second from rank 0 to rank 1, by transfers that should take half a second."""
    payload = torch.zeros(round(promised / 8 / 2), dtype=torch.uint8)
    seconds = []
    for _ in range(3):
        dist.barrier()
        start = perf_counter()
        if dist.get_rank() == 0:
            dist.send(payload, 1)
        else:
            dist.recv(payload, 0)
        dist.barrier()  # rank 0 has handed it to the kernel only; now it has arrived
        seconds.append(perf_counter() - start)
    return payload.nbytes * 8 / median(seconds)


# --- the two nodes ------------------------------------------------------------------------------------


def measure(rate: str, nodes: Sequence[Node], args: argparse.Namespace) -> tuple[float, list[Result]]:
    namespaces.shape(nodes, bits_per_s(rate))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = args.steps or (15 if bits_per_s(rate) >= 5e8 else 5)
        options = ["--rates", rate, "--model", args.model, "--steps", str(steps)]
        options += ["--precisions", *args.precisions, "--address", nodes[0].address]
        reply = folder / "reply"
        command = [sys.executable, __file__, *options, "--reply", str(reply), "--rank"]
        with namespaces.running(nodes, [[*command, str(rank)] for rank in (0, 1)], folder) as started:
            namespaces.finish(started, folder, args.limit_s)
        found: tuple[float, list[Result]] = torch.load(reply, weights_only=False)
        return found


def end(number: int, _: FrameType | None) -> None:
    """A signal that would end us at once ends us in order: ranks and nodes go first, undisturbed."""
    for ignored in ENDINGS:
        signal.signal(ignored, signal.SIG_IGN)
    sys.exit(128 + number)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"], help="as tc writes them")
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--steps", type=int, help="counted steps of each engine; by default fewer the slower")
    precisions = list(contenders.TOLERANCE)
    parser.add_argument("--precisions", nargs="+", choices=precisions, default=precisions)
    parser.add_argument("--limit-s", type=float, default=900.0, help="seconds that one rate may take")
    for hidden, kind in (("--rank", int), ("--address", str), ("--reply", str)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for rate in args.rates:
        bits_per_s(rate)
    return args


def main() -> None:
    args = parse()
    if args.rank is not None:
        return rank_main(args)
    for number in ENDINGS:
        signal.signal(number, end)
    print(f"{report.machine()}; 2 ranks in 2 network namespaces, gloo, AdamW (foreach)")
    print(f"{args.model}: {contenders.describe(args.model)}\n", flush=True)
    groups = {}
    try:
        with namespaces.two_nodes() as nodes:
            for rate in args.rates:
                carried, results = measure(rate, nodes, args)
                print(f"Link of {rate}: a known transfer went at {carried / 1e6:.0f} Mbit/s.\n")
                print(report.markdown(contenders.HEADERS, contenders.rows(results)), end="\n\n", flush=True)
                groups[rate] = {r.contender.name: r.step_s * 1e3 for r in results}
    except namespaces.Unavailable as error:
        sys.exit(f"This benchmark needs root and iproute2 (ip, tc): {error}.")
    plot = report.bar_plot(
        report.OUTPUT / "slow_link.png", groups,
        title="Training step over a slow link, 2 CPU ranks, gloo", unit="ms/step", baseline="DDP",
    )  # fmt: skip
    print(f"Plot: {plot.relative_to(report.OUTPUT.parent)}")
    return None


if __name__ == "__main__":
    main()
