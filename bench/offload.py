"""Training with values in host memory: fullshard beside FSDP2's CPUOffloadPolicy and DeepSpeed, on one GPU.

    make bench-offload    (or: python bench/offload.py --rows 1b 4b --engines "host" "FSDP2")

Every engine has a process of its own, because two do not fit into one host's memory: the same model, tokens,
AdamW and clipping. "ms/step" is a mean of steps in a row, from an idle device to an idle device: what one
leaves behind is in the time of the next, and what the last one leaves behind counts as well. "sustained ms"
is the median time from the end of a backward to the end of the next one, as long runs have it. "clip ms" and
"step() ms" are what the host waits there. `compute` is forward and backward of the bf16 model with no
optimizer, recomputed where the row is: nobody can be faster without computing less. "of the bound" is the
time that the values at rest on the host need on the link, at the rate measured with copies both ways at once,
as a share of the step.

DeepSpeed runs where it can be imported and can compile its AdamW for the host; it clips within its step.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import fullshard as fs
import report
from fullshard.host_memory import page_locked
from fullshard.planning.transfers import transfers_of
from fullshard.tools.simulation.models import Subject, blocks_of, decoder, subject
from fullshard.tools.simulation.presets import PRESETS
from report import machine, markdown


@dataclass(frozen=True)
class Row:
    name: str
    model: str
    layers: int | None
    tokens: int
    cap_gib: float | None = None  # of device memory
    checkpoint: bool = False
    vocabulary: int | None = None

    @property
    def subject(self) -> Subject:
        if self.vocabulary is None:
            return subject(self.model, self.layers, self.tokens)
        shape = replace(PRESETS[self.model], vocabulary=self.vocabulary)
        return decoder(self.model, shape, self.tokens)

    @property
    def title(self) -> str:
        layers = f"{self.layers} layers of " if self.layers else ""
        cap = f", device capped at {self.cap_gib:g} GiB" if self.cap_gib else ""
        return f"{layers}{self.model}, {self.tokens:,} tokens{cap}"


ROWS = {
    row.name: row
    for row in (
        Row("1b", "llama-1b", None, 4096),
        Row("4b", "llama-8b", 16, 8192),
        Row("8b", "llama-8b", None, 8192, cap_gib=24, checkpoint=True, vocabulary=128256),
        Row("8b-disk", "llama-8b", None, 8192, checkpoint=True, vocabulary=128256),
        Row("13b", "llama-13b", None, 16384, checkpoint=True),
    )
}
# Steps before those that are timed. In the third, fullshard gives back what only the first ones needed.
WARM_UP = 4
LONGEST_S = 300  # of one engine
ACTIVATIONS = "activations"  # with this, inputs of blocks wait in host memory, too
ENGINES: dict[str, Any] = {
    "compute": None,
    "host": "host",
    "optimizer": "optimizer",
    "optimizer, split": {"kinds": ("master", "state"), "split_masters": True},
    "moments": {"kinds": ("state",)},
    "host, overlap": {"overlap": True},
    "host, split, overlap": {"split_masters": True, "overlap": True},
    "optimizer, overlap": {"kinds": ("master", "state"), "overlap": True},
    "optimizer, split, overlap": {"kinds": ("master", "state"), "split_masters": True, "overlap": True},
    "optimizer, split, overlap, 12 GiB of slabs": {
        "kinds": ("master", "state"),
        "split_masters": True,
        "overlap": True,
        "slabs": "12GiB",
    },
    "moments, overlap": {"kinds": ("state",), "overlap": True},
    "3 GiB, split, overlap": {"device": "3GiB", "split_masters": True, "overlap": True},
    "3 GiB, one backward": {"device": "3GiB", "one_backward": True},
    "3 GiB, one backward, overlap": {"device": "3GiB", "one_backward": True, "overlap": True},
    "3 GiB, split, one backward, overlap": {
        "device": "3GiB",
        "split_masters": True,
        "one_backward": True,
        "overlap": True,
    },
    "40 GiB": {"device": "40GiB"},
    "40 GiB, overlap": {"device": "40GiB", "overlap": True},
    "114 GiB, one backward, overlap": {"device": "114GiB", "one_backward": True, "overlap": True},
    "122 GiB, one backward, overlap": {"device": "122GiB", "one_backward": True, "overlap": True},
    "125 GiB, one backward, overlap": {"device": "125GiB", "one_backward": True, "overlap": True},
    "122 GiB, one backward, overlap, activations": {
        "device": "122GiB",
        "one_backward": True,
        "overlap": True,
        ACTIVATIONS: True,
    },
    "disk": {"host": "60GiB", "disk": "/tmp/fullshard-bench"},
    "40 GiB, disk": {"device": "40GiB", "host": "60GiB", "disk": "/tmp/fullshard-bench"},
    "FSDP2": None,
    "DeepSpeed ZeRO-2": 2,
    "DeepSpeed ZeRO-3": 3,
}
RIVALS = ("compute", "FSDP2", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3")


@dataclass(frozen=True)
class Figures:
    step_s: float
    sustained_s: float
    clip_s: float
    optimizer_s: float
    loss: float
    peak_gib: float
    host_gib: float
    start_s: float
    link_s: float | None  # in a step, at the measured rate
    alloc_retries: int  # in timed steps: each waits for the device


def link_rate() -> float:
    """Bytes per second each way, with copies both ways at once."""
    size, count = 64 * 2**20, 16
    host, other = page_locked(size * count), page_locked(size * count)
    device, back = (torch.empty(size * count, dtype=torch.uint8, device="cuda") for _ in range(2))
    up, down = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for start in [*range(0, size * count, size)] * 4:
        part = slice(start, start + size)
        with torch.cuda.stream(up):
            device[part].copy_(host[part], non_blocking=True)
        with torch.cuda.stream(down):
            other[part].copy_(back[part], non_blocking=True)
    torch.cuda.synchronize()
    return 4 * size * count / (time.perf_counter() - begun)


def link_bytes(model: nn.Module) -> int:
    """What crosses the link to the host in a step, in the direction that has more."""
    resting = fs.plan(model).resting
    if resting is None:
        return 0
    moved = transfers_of(resting, gathers=[2] * len(resting.lanes))  # in forward and in backward
    return max(moved.pass_up + moved.step_up, moved.pass_down + moved.step_down)


def build(row: Row, engine: str) -> tuple[nn.Module, Any, Any]:
    what = row.subject
    device = torch.device("cuda")
    with torch.device("meta"):
        model = what.build()
    assert what.initialize is not None
    torch.manual_seed(0)
    if engine == "FSDP2":
        fsdp2(model)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for module in model.modules():
                what.initialize(module)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
    elif engine == "compute" or engine.startswith("DeepSpeed"):
        model = model.to(torch.bfloat16).to_empty(device=device)
        with torch.no_grad():
            model.apply(what.initialize)
        for block in blocks_of(model) if row.checkpoint else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if engine != "compute":
            model = deepspeed(model, ENGINES[engine])
    else:
        given = copy.copy(ENGINES[engine])
        inputs_too = isinstance(given, dict) and given.pop(ACTIVATIONS, False)
        offload = fs.Offload(**given) if isinstance(given, dict) else given
        fs.shard(
            model,
            precision="bf16",
            materialize=what.initialize,
            device="cuda",
            offload=offload,
            checkpoint_activations="offload" if inputs_too else row.checkpoint,
        )
    return model, what, what.batch(device)


def fsdp2(model: nn.Module) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    blocks = blocks_of(model)
    for block in blocks:
        fully_shard(block, mp_policy=policy, offload_policy=CPUOffloadPolicy())
    fully_shard(model, mp_policy=policy, offload_policy=CPUOffloadPolicy())


def deepspeed(model: nn.Module, stage: int) -> nn.Module:
    """Optimizer state on the host, with ZeRO-3 parameters as well; AdamW runs on the host."""
    import deepspeed

    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed looks there
    on_host = {"device": "cpu", "pin_memory": True}
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": on_host}
    if stage == 3:
        zero["offload_param"] = on_host
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    }
    engine: nn.Module = deepspeed.initialize(model=model, config=settings)[0]
    return engine


def run(row: Row, engine: str, steps: int) -> Figures:
    """In this process alone."""
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    if row.cap_gib is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(row.cap_gib * 2**30 / total)
    rate = link_rate()
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    begun = time.perf_counter()
    model, what, batch = build(row, engine)
    optimizer = None
    if engine not in RIVALS or engine == "FSDP2":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    start_s = 0.0
    for step in range(WARM_UP):
        one_step(model, what, batch, optimizer)
        torch.cuda.synchronize()
        if step == 0:
            start_s = time.perf_counter() - begun
    torch.cuda.reset_peak_memory_stats()
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(steps)]  # of backwards
    timed = time.perf_counter()
    times = [one_step(model, what, batch, optimizer, end) for end in ends]
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - timed) / steps
    sustained_s = median(one.elapsed_time(other) for one, other in pairwise(ends)) / 1e3
    shown = [step_s, sustained_s, *map(median, zip(*times, strict=True))]
    loss = what.loss(model, batch).detach()
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated()
    link_s = None if engine in RIVALS else link_bytes(model) / rate
    retries = torch.cuda.memory_stats()["num_alloc_retries"] - retries
    return Figures(*shown, loss.item(), peak / 2**30, host / 2**30, start_s, link_s, retries)


def one_step(
    model: nn.Module, what: Any, batch: Any, optimizer: Any, end: torch.cuda.Event | None = None
) -> tuple[float, float]:
    """Seconds that the host waits for clipping, and for the optimizer. `end` is recorded behind backward."""
    loss = what.loss(model, batch)
    is_deepspeed = hasattr(model, "backward")
    model.backward(loss) if is_deepspeed else loss.backward()
    if end is not None:
        end.record()
    if is_deepspeed:
        begun = time.perf_counter()
        model.step()
        return 0.0, time.perf_counter() - begun
    if optimizer is None:
        model.zero_grad()
        return 0.0, 0.0
    before_clip = time.perf_counter()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    clipped = time.perf_counter()
    optimizer.step()
    stepped = time.perf_counter()
    optimizer.zero_grad()
    return clipped - before_clip, stepped - clipped


def in_process(row: str, engine: str, steps: int) -> Figures | None:
    command = [sys.executable, __file__, "--child", row, engine, "--steps", str(steps)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    except subprocess.TimeoutExpired:
        print(f"{row}, {engine}: not over after {LONGEST_S} s", flush=True)
        return None
    if done.returncode:
        print(f"{row}, {engine}: {done.stderr.strip().splitlines()[-12:]}", flush=True)
        return None
    return Figures(**json.loads(done.stdout.splitlines()[-1]))


def table(row: Row, found: dict[str, Figures]) -> str:
    rival = found.get("FSDP2")
    heads = ["engine", "ms/step", "sustained ms", "times as fast as FSDP2", "clip ms", "step() ms"]
    heads += ["tokens/s", "of the bound", "peak device GiB", "peak host GiB", "first step after s"]
    heads.append("alloc retries")
    rows = [
        [
            engine,
            f"{f.step_s * 1e3:.0f}",
            f"{f.sustained_s * 1e3:.0f}",
            f"{rival.step_s / f.step_s:.2f}" if rival else "-",
            f"{f.clip_s * 1e3:.1f}",
            f"{f.optimizer_s * 1e3:.0f}",
            f"{row.tokens / f.step_s:.0f}",
            "-" if f.link_s is None else f"{f.link_s / f.step_s:.2f}",
            f"{f.peak_gib:.1f}",
            f"{f.host_gib:.1f}",
            f"{f.start_s:.0f}",
            f"{f.alloc_retries}",
        ]
        for engine, f in found.items()
    ]
    return f"### {row.title}\n\n{markdown(heads, rows)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--steps", type=int, default=5, help="at least 2")
    parser.add_argument("--output", type=Path, default=report.OUTPUT)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        row, engine = args.child
        print(json.dumps(asdict(run(ROWS[row], engine, args.steps))))
        return
    args.output.mkdir(exist_ok=True, parents=True)
    print(f"{machine()}\n", flush=True)
    text, everything = [], {}
    for name in args.rows:
        found = {engine: in_process(name, engine, args.steps) for engine in args.engines}
        figures = {engine: f for engine, f in found.items() if f is not None}
        text.append(table(ROWS[name], figures))
        print(text[-1], flush=True)
        everything[name] = {engine: asdict(f) for engine, f in figures.items()}
        gc.collect()
    (args.output / "offload.md").write_text(f"{machine()}\n\n" + "\n".join(text))
    (args.output / "offload.json").write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
