"""The predictions of `fullshard plan` for the time of a step beside what one device measures as one rank of
simulated clusters: models, strategies and networks.

    python bench/time_check.py                      # a GPU: about two minutes
    python bench/time_check.py --gpu h200           # by the public figures of a card, not by measured rates
    python bench/time_check.py --device cpu --tiny  # does it run at all
    python bench/time_check.py --choices            # every setting measured, the chosen one beside the best

Rates are measured first, in seconds, unless --gpu names a card. A ratio above 1 means that the prediction is
too long.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass, replace

import torch

from fullshard.planning.answers import Question, need_of, step_of
from fullshard.planning.choosing import Scope, Traced, choose
from fullshard.planning.machines import Machine, described
from fullshard.planning.needs import Need, Step
from fullshard.planning.network import INSIDE_HOP_S, Link, Network
from fullshard.planning.offloading import Request
from fullshard.planning.rates import measured
from fullshard.planning.settings import Settings
from fullshard.planning.subjects import Batch
from fullshard.planning.subjects import decoder as planned_decoder
from fullshard.tools.simulation.measure import Figures
from fullshard.tools.simulation.models import decoder
from fullshard.tools.simulation.presets import PRESETS
from fullshard.tools.simulation.run import Scenario, simulate


@dataclass(frozen=True)
class Case:
    preset: str
    layers: int
    tokens: int
    ranks: int
    link_gb: float
    node_ranks: int | None = None
    strategy: str = "zero3"
    recompute: bool = False
    offload: str | None = None
    keep_full: int | str | None = None
    keep_node: int | str | None = None

    @property
    def network(self) -> Network:
        link = Link(self.link_gb * 1e9)
        if self.node_ranks is None:
            return Network(self.ranks, link)
        return Network(self.ranks, link, self.node_ranks, Link(400e9, INSIDE_HOP_S))

    def __str__(self) -> str:
        nodes = "" if self.node_ranks is None else f" in nodes of {self.node_ranks}"
        more = ", recomputed" if self.recompute else ""
        more += "" if self.offload is None else f", offload {self.offload}"
        for name in ("keep_full", "keep_node"):
            value = getattr(self, name)
            more += "" if value is None else f", {name} {value}"
        return (
            f"{self.layers} layers of {self.preset}, {self.ranks} ranks{nodes}, {self.link_gb:g} GB/s, "
            f"{self.strategy}{more}"
        )


CASES = (
    Case("gpt-124m", 12, 8192, 8, 300),
    Case("llama-1b", 16, 4096, 64, 300),
    Case("llama-1b", 16, 4096, 64, 300, strategy="zero2"),
    Case("llama-1b", 16, 4096, 1, 300),
    Case("llama-8b", 8, 4096, 64, 300),
    Case("llama-8b", 8, 4096, 64, 50),
    Case("llama-8b", 8, 4096, 64, 50, recompute=True),
    Case("llama-8b", 8, 4096, 64, 12, 8),
    Case("llama-8b", 8, 4096, 64, 6, 8, "hybrid"),
    Case("llama-8b", 8, 4096, 64, 6, 8, "zero2"),
    Case("llama-70b", 4, 4096, 256, 50),
    Case("llama-8b", 4, 4096, 1, 50, offload="optimizer"),
)
TINY = (
    Case("gpt-8m", 2, 64, 4, 1),
    Case("gpt-8m", 2, 64, 8, 0.5, 4, "zero2"),
    Case("gpt-8m", 2, 64, 8, 0.5, 4, "hybrid"),
)
# Clusters for which all settings are measured.
HELD = (
    Case("llama-1b", 8, 4096, 64, 300),
    Case("llama-1b", 8, 4096, 64, 25),
    Case("llama-1b", 8, 2048, 32, 12, 8),
    Case("llama-1b", 8, 2048, 64, 3, 8),
    Case("llama-8b", 2, 4096, 16, 100),
    Case("llama-8b", 2, 4096, 64, 25, 4),
    Case("llama-8b", 2, 4096, 256, 12, 8),
    Case("gpt-124m", 12, 8192, 8, 50),
    Case("gpt-350m", 12, 8192, 16, 12, 8),
    Case("gpt-350m", 12, 4096, 8, 6),
)

ROUNDS = 2  # of all settings, in turns: where the host is the limit, one differs from the next by a tenth


def traced(case: Case, on_gpu: bool) -> Step:
    shape = replace(PRESETS[case.preset], layers=case.layers)
    length = min(shape.context, case.tokens)
    subject = planned_decoder(case.preset, shape, Batch(case.tokens // length, length))
    question = Question(memory_bytes=2**50, optimizer="fused-adamw", recompute=case.recompute, on_gpu=on_gpu)
    return step_of(subject, question)[0]


def on_cluster(machine: Machine, case: Case) -> Machine:
    network = case.network
    return replace(machine, inside=network.inside or network.link, across=network.link)


def predicted(case: Case, machine: Machine, on_gpu: bool) -> Need:
    question = Question(
        ranks=case.ranks,
        memory_bytes=2**50,
        strategies=(case.strategy,),
        optimizer="fused-adamw",
        recompute=case.recompute,
        node_ranks=case.node_ranks,
        on_gpu=on_gpu,
        offload=None if case.offload is None else Request(case.offload, rates=machine.host),
        machine=on_cluster(machine, case),
    )
    return need_of(traced(case, on_gpu), question, case.strategy)


def run(case: Case, device: torch.device, steps: int) -> Figures | None:
    """What a step measures; None where it does not fit."""
    shape = replace(PRESETS[case.preset], layers=case.layers)
    scenario = Scenario(
        decoder(case.preset, shape, case.tokens),
        case.network,
        device,
        strategy=case.strategy,
        checkpoint_activations=case.recompute,
        keep_full=case.keep_full,
        keep_node=case.keep_node,
        offload=case.offload,
        warmup=2,
        steps=steps,
    )
    figures = simulate(scenario, "fullshard").figures
    gc.collect()
    return figures


def compare(cases: tuple[Case, ...], machine: Machine, device: torch.device, steps: int) -> None:
    heads = ["model, ranks, link, strategy", "measured ms", "predicted ms", "predicted / measured"]
    heads += ["bound by", "host ms", "predicted"]
    print(f"| {' | '.join(heads)} |\n| --- | ---: | ---: | ---: | --- | ---: | ---: |")
    ratios = []
    for case in cases:
        times = predicted(case, machine, device.type == "cuda").times
        assert times is not None
        real = run(case, device, steps)
        if real is None:
            print(f"| {case} | does not fit | {times.step_s * 1e3:.1f} | | {times.bound} | | |", flush=True)
            continue
        ratios.append(times.step_s / real.step_s)
        row = [f"{real.step_s * 1e3:.1f}", f"{times.step_s * 1e3:.1f}", f"{ratios[-1]:.3f}", times.bound]
        row += [f"{real.host_s * 1e3:.1f}", f"{times.host_s * 1e3:.1f}"]
        print(f"| {case} | {' | '.join(row)} |", flush=True)
    within = sum(0.9 <= ratio <= 1.1 for ratio in ratios)
    print(f"\n{within} of {len(ratios)} within a tenth; from {min(ratios):.2f} to {max(ratios):.2f}.")


def compare_choices(cases: tuple[Case, ...], machine: Machine, device: torch.device, steps: int) -> None:
    print("| cluster | chosen | its ms | best | its ms | chosen / best |")
    print("| --- | --- | ---: | --- | ---: | ---: |")
    on_gpu = device.type == "cuda"
    for case in cases:
        strategies = ["replicate", "zero2", "zero3"] + ["hybrid"] * (case.node_ranks is not None)
        step = traced(case, on_gpu)
        scope = Scope(
            case.preset,
            case.ranks,
            case.node_ranks,
            on_cluster(machine, case),
            machine.device.memory_bytes,
            optimizer="fused-adamw",
            on_gpu=on_gpu,
            offloads=(None,),
        )
        choice = choose(scope, [Traced({False: step}, None, case.tokens)]).settings
        settings = [Settings(name) for name in strategies]
        settings += [Settings("zero3", keep_full=0), Settings("zero3", keep_full="all")]
        if case.node_ranks is not None:
            settings += [Settings("zero3", keep_node=0), Settings("zero3", keep_node="all")]
        real: dict[Settings, float] = {}
        for one in [*dict.fromkeys([choice, *settings])] * ROUNDS:
            changed = replace(case, strategy=one.strategy, keep_full=one.keep_full, keep_node=one.keep_node)
            taken = run(changed, device, steps)
            if taken is not None:
                real[one] = min(taken.step_s, real.get(one, taken.step_s))
        best = min(real, key=lambda one: real[one])
        ratio = real[choice] / real[best]
        times = f"{choice} | {real[choice] * 1e3:.1f} | {best} | {real[best] * 1e3:.1f} | {ratio:.3f}"
        print(f"| {case} | {times} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpu", help="a card by its public figures")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--choices", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="begin with this case")
    parser.add_argument("--cases", type=int, default=99, help="at most so many")
    options = parser.parse_args()
    device = torch.device(options.device)
    begun = time.perf_counter()
    machine = measured(device) if options.gpu is None else described(options.gpu)
    print(f"{machine.source} ({time.perf_counter() - begun:.1f} s)\n")
    if options.choices:
        cases = HELD if not options.tiny else TINY
        part = cases[options.first : options.first + options.cases]
        compare_choices(part, machine, device, options.steps)
    else:
        cases = CASES if not options.tiny else TINY
        compare(cases[options.first : options.first + options.cases], machine, device, options.steps)


if __name__ == "__main__":
    main()
