"""Is the simulator right? Steps that it predicts beside the same steps over a real, shaped link.

    make bench-simulator       (or: python bench/simulator_check.py --rates 50mbit 200mbit --steps 5)

Two nodes of two ranks in network namespaces, as in bench/slow_link.py. The links are measured first
(`fullshard.comm.probe`), then every engine trains over gloo, and then the same engines on the same ranks over
the simulated network with the measured speeds; all four ranks simulate at the same time, so that they share
the processor's cores as before. Both happen in turns, and the faster turn of each counts: other processes
disturb it least. gloo's collectives are rings, and its reduce-scatter is an all-reduce: that is what is
simulated. Rates are so low that the wire is what takes time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

import contenders
import report
import slow_link
from contenders import MODELS, Contender, Trainer
from fullshard.comm.probe import probe
from fullshard.planning.network import Link, Load, Network, Placement
from fullshard.tools.simulation.group import Cluster, joined
from namespaces import Node, Unavailable, connected, shape

NODE_RANKS = 2
WARMUP = 2
ENGINES = ("FSDP2", "HSDP", "fullshard")


class GlooNetwork(Network):
    """gloo makes an all-reduce of a reduce-scatter."""

    def load(self, kind: str, size_bytes: float, group: Placement) -> Load:
        return super().load("all-reduce" if kind == "reduce-scatter" else kind, size_bytes, group)


# --- a rank -------------------------------------------------------------------------------------------


def rank_main(args: argparse.Namespace) -> None:
    rank, folder = int(os.environ["RANK"]), Path(args.folder)
    chosen = contenders.chosen(ENGINES, args.precisions, node_ranks=NODE_RANKS)
    speeds_file = folder / "speeds.json"
    if args.phase.startswith("real"):
        contenders.join(None, threads=1)
        speeds = probe(enough_s=1.0)
        assert speeds.inside is not None
        assert speeds.across is not None
        if rank == 0 and not speeds_file.exists():
            speeds_file.write_text(
                json.dumps([[s.bandwidth_bytes_s, s.latency_s] for s in (speeds.across, speeds.inside)])
            )
        found = [timed(contender, args) for contender in chosen]
        dist.barrier()
        dist.destroy_process_group()
    else:
        torch.set_num_threads(1)
        across, inside = (Link(*values) for values in json.loads(speeds_file.read_text()))
        network = GlooNetwork(4, across, NODE_RANKS, inside, rings=True, collective_s=0.0)
        with joined(Cluster(network, torch.device("cpu"), rank)):
            found = [
                timed(contender, args, folder / f"{args.phase}-begins-{at}")
                for at, contender in enumerate(chosen)
            ]
    torch.save(found, folder / f"{args.phase}-{rank}")


def timed(contender: Contender, args: argparse.Namespace, together: Path | None = None) -> float:
    """Median seconds per step. `together`: simulated ranks do not wait for each other, but begin at once."""
    torch.manual_seed(0)
    trainer: Trainer = contender.make(contenders.GPT(MODELS[args.model]))
    if together is not None:
        wait_for_ranks(together)
    seconds = []
    for batch in contenders.batches(args.steps + WARMUP, MODELS[args.model]):
        if together is None:
            dist.barrier()
        begun = perf_counter()
        trainer.step(*batch)
        seconds.append(perf_counter() - begun)
    return median(seconds[WARMUP:])


def wait_for_ranks(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / os.environ["RANK"]).touch()
    while len(list(folder.iterdir())) < 2 * NODE_RANKS:
        time.sleep(0.01)


# --- the nodes ----------------------------------------------------------------------------------------


def check(rate: str, nodes: Sequence[Node], args: argparse.Namespace) -> list[list[str]]:
    shape(nodes, slow_link.bits_per_s(rate))
    options = ["--rates", rate, "--model", args.model, "--steps", str(args.steps)]
    options += ["--precisions", *args.precisions]
    with tempfile.TemporaryDirectory() as name:
        times: dict[str, list[list[float]]] = {"real": [], "simulated": []}
        for turn in range(args.turns):
            for phase, turns in times.items():
                inner = [*options, "--phase", f"{phase}-{turn}", "--folder", name]
                slow_link.launch(__file__, inner, nodes, NODE_RANKS, args.limit_s)
                ranks = [torch.load(Path(name) / f"{phase}-{turn}-{rank}") for rank in range(4)]
                turns.append([max(of_ranks) for of_ranks in zip(*ranks, strict=True)])
        fastest = {
            phase: [min(turns) for turns in zip(*found, strict=True)] for phase, found in times.items()
        }
        across, inside = json.loads((Path(name) / "speeds.json").read_text())
    links = [
        f"{speed * 8 / 1e6:.4g} Mbit/s and {hop * 1e3:.2f} ms per hop" for speed, hop in (across, inside)
    ]
    print(f"{rate}: measured {links[0]} across, {links[1]} inside, per rank.", flush=True)
    chosen = contenders.chosen(ENGINES, args.precisions, node_ranks=NODE_RANKS)
    return [
        [rate, contender.name, f"{real * 1e3:.0f}", f"{predicted * 1e3:.0f}", f"{predicted / real:.2f}"]
        for contender, real, predicted in zip(chosen, fastest["real"], fastest["simulated"], strict=True)
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=["50mbit", "200mbit"], help="as tc writes them")
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16 gradients"])
    parser.add_argument("--limit-s", type=float, default=1200.0, help="seconds that one rate may take")
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.phase is not None:
        return rank_main(args)
    for number in slow_link.ENDINGS:
        signal.signal(number, slow_link.end)
    print(f"{report.machine()}; 2 nodes of {NODE_RANKS} in network namespaces, gloo\n", flush=True)
    headers = ["link", "engine", "measured ms/step", "predicted ms/step", "predicted / measured"]
    try:
        with connected(2) as nodes:
            for rate in args.rates:
                print(f"\n{report.markdown(headers, check(rate, nodes, args))}\n", flush=True)
    except Unavailable as error:
        sys.exit(f"This benchmark needs root and iproute2 (ip, tc): {error}.")
    return None


if __name__ == "__main__":
    main()
