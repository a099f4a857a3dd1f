"""A step over a slow link: fullshard beside DDP, FSDP2 and HSDP, two nodes of two ranks, a wire between them.

    make bench-link       (or: python bench/slow_link.py --rates 100mbit 1gbit --model small --steps 5)

Each node is a network namespace with its own torchrun agent; a veth pair joins them, and the kernel (tc,
token bucket) lets each end send no faster than the rate, which the ranks of a node share. It takes root and
iproute2. What the link really carries is timed with a known transfer and printed. See bench/contenders.py for
how the engines take turns; "MB sent" is what the kernel counted on one rank's connections in one step, and
"MB across" how much of it to the other node.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import contenders
import namespaces
import report
from contenders import MODELS, Result
from namespaces import Node

RIVALS = ("DDP", "FSDP2", "HSDP")
ENGINES = (*RIVALS, "fullshard")
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
    """What a rank runs: look at the link, then race; rank 0 leaves the results in a file."""
    contenders.join(None, threads=1)
    carried = link_rate(bits_per_s(args.rates[0]), args.node_ranks)
    chosen = contenders.chosen(ENGINES, args.precisions, args.node_ranks)
    results = contenders.race(chosen, MODELS[args.model], args.steps, WARMUP)
    if dist.get_rank() == 0:
        torch.save((carried, results), args.reply)
    dist.barrier()
    dist.destroy_process_group()


def link_rate(promised: float, node_ranks: int) -> float:
    """Bits per second from the first node to the second, all ranks at once: half a second of transfers."""
    payload = torch.zeros(round(promised / 8 / 2 / node_ranks), dtype=torch.uint8)
    rank, seconds = dist.get_rank(), []
    for _ in range(3):
        dist.barrier()
        start = perf_counter()
        if rank < node_ranks:
            dist.send(payload, rank + node_ranks)
        else:
            dist.recv(payload, rank - node_ranks)
        dist.barrier()  # it was handed to the kernel only; now it has arrived
        seconds.append(perf_counter() - start)
    return payload.nbytes * node_ranks * 8 / median(seconds)


# --- the two nodes ------------------------------------------------------------------------------------


def launch(script: str, options: list[str], nodes: Sequence[Node], node_ranks: int, limit_s: float) -> None:
    """Run a script on all ranks: one torchrun agent per node. An error has the last words of all of them."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--max-restarts", "0"]
    torchrun += ["--nproc-per-node", str(node_ranks)]
    torchrun += ["--master-addr", nodes[0].address, "--master-port", str(PORT)]
    commands = [[*torchrun, "--node-rank", str(index), script, *options] for index in range(len(nodes))]
    with tempfile.TemporaryDirectory() as name, namespaces.running(nodes, commands, Path(name)) as started:
        namespaces.finish(started, Path(name), limit_s)


def measure(rate: str, nodes: Sequence[Node], args: argparse.Namespace) -> tuple[float, list[Result]]:
    namespaces.shape(nodes, bits_per_s(rate))
    with tempfile.TemporaryDirectory() as name:
        reply = Path(name) / "reply"
        steps = args.steps or (15 if bits_per_s(rate) >= 5e8 else 5)
        options = ["--rates", rate, "--model", args.model, "--steps", str(steps), "--reply", str(reply)]
        options += ["--node-ranks", str(args.node_ranks), "--precisions", *args.precisions]
        launch(__file__, options, nodes, args.node_ranks, args.limit_s)
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
    parser.add_argument("--node-ranks", type=int, default=2, help="ranks per node")
    parser.add_argument("--steps", type=int, help="counted steps of each engine; by default fewer the slower")
    precisions = list(contenders.TOLERANCE)
    parser.add_argument("--precisions", nargs="+", choices=precisions, default=precisions)
    parser.add_argument("--limit-s", type=float, default=900.0, help="seconds that one rate may take")
    parser.add_argument("--reply", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for rate in args.rates:
        bits_per_s(rate)
    return args


def main() -> None:
    args = parse()
    if args.reply is not None:
        return rank_main(args)
    for number in ENDINGS:
        signal.signal(number, end)
    where = f"2 nodes of {args.node_ranks} in network namespaces"
    print(f"{report.machine()}; {where}, gloo, AdamW (foreach)")
    print(f"{args.model}: {contenders.describe(args.model)}\n", flush=True)
    groups = {}
    try:
        with namespaces.connected(2) as nodes:
            for rate in args.rates:
                carried, results = measure(rate, nodes, args)
                print(f"Link of {rate}: a known transfer went at {carried / 1e6:.0f} Mbit/s.\n")
                print(contenders.table(results, RIVALS), end="\n\n", flush=True)
                groups[rate] = {r.contender.name: r.step_s * 1e3 for r in results}
    except namespaces.Unavailable as error:
        sys.exit(f"This benchmark needs root and iproute2 (ip, tc): {error}.")
    plot = report.bar_plot(
        report.OUTPUT / "slow_link.png", groups,
        title=f"Training step over a slow link, {where}, gloo", unit="ms/step", baseline="DDP",
    )  # fmt: skip
    print(f"Plot: {plot.relative_to(report.OUTPUT.parent)}")
    return None


if __name__ == "__main__":
    main()
