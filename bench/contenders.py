"""The engines that are compared on CPU ranks, and the race in which their steps take turns.

All contenders train the same model on the same batches in the same processes. They take turns step by step,
so that all see the same machine, and must come out at the same loss. The time of a step is that of its
slowest rank; medians count.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import report
import wire
from fullshard.training.gpt import GPT, Block, GPTConfig

LEARNING_RATE = 1e-4
BATCH, CONTEXT = 4, 64
_SHAPE = partial(GPTConfig, context=CONTEXT, vocabulary=256, norm="layer", positions="learned")
MODELS = {
    "tiny": _SHAPE(num_layers=6, width=64),
    "small": _SHAPE(num_layers=4, width=256),
    "medium": _SHAPE(num_layers=8, num_heads=8, width=512),
}

# How far apart two losses may be, relative to their size, after the same steps in these precisions.
TOLERANCE = {"fp32": 1e-3, "bf16 gradients": 1e-2, "bf16": 2e-2}


def describe(name: str) -> str:
    with torch.device("meta"):
        millions = sum(p.numel() for p in GPT(MODELS[name]).parameters()) / 1e6
    config = MODELS[name]
    shape = f"GPT of {config.num_layers} blocks, width {config.width}, {millions:.1f} M parameters"
    return f"{shape}; {BATCH} sequences of {CONTEXT} bytes per rank and step"


class Trainer:
    """One contender at work."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = adamw(model)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens, targets).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=True)


@dataclass(frozen=True)
class Contender:
    """An engine with its settings. Contenders of one precision send and compute the same dtypes."""

    engine: str
    setting: str
    make: Callable[[GPT], Trainer]
    precision: str = "fp32"
    nodes: bool = False  # it makes sense on several nodes only
    one_rank: bool = False  # of these: where each has one rank, too

    @property
    def name(self) -> str:
        precision = "" if self.precision == "fp32" else self.precision
        return " ".join(filter(None, (self.engine, self.setting, precision)))


# --- the engines --------------------------------------------------------------------------------------


def ddp(model: GPT, bf16_gradients: bool = False) -> Trainer:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if bf16_gradients:
        # Torch refuses its own hook by name where there is no NCCL, although gloo can sum bf16.
        wrapped.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    return Trainer(wrapped)


def fsdp1(model: GPT, strategy: str) -> Trainer:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    return Trainer(
        FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    )


def fsdp2(model: GPT, reshard: bool, hybrid: bool = False, **dtypes: torch.dtype) -> Trainer:
    """hybrid: sharded inside a node and replicated across, as a launcher's variables have the nodes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    if hybrid:
        inner = int(os.environ["LOCAL_WORLD_SIZE"])
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (ranks // inner, inner), mesh_dim_names=names)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(**dtypes)}
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=reshard, **options)
    return Trainer(model)


class _DeepSpeedTrainer(Trainer):
    """DeepSpeed has a backward and a step of its own."""

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens, targets).loss
        engine: Any = self.model
        engine.backward(loss)
        engine.step()
        return loss.detach()


def deepspeed(model: GPT, stage: int) -> Trainer:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,  # it would clip to 1.0 unasked
    }
    trainer = _DeepSpeedTrainer(model)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it builds
        trainer.model = deepspeed.initialize(model=model, optimizer=trainer.optimizer, config=settings)[0]
    return trainer


def fullshard(model: GPT, strategy: str, **options: Any) -> Trainer:
    import fullshard as fs

    precision = fs.Precision(**options) if options else "fp32"
    return Trainer(fs.shard(model, strategy=strategy, precision=precision))


BF16 = torch.bfloat16
ALL = (
    Contender("DDP", "", ddp),
    Contender("FSDP1", "FULL_SHARD", partial(fsdp1, strategy="FULL_SHARD")),
    Contender("FSDP1", "SHARD_GRAD_OP", partial(fsdp1, strategy="SHARD_GRAD_OP")),
    Contender("FSDP2", "reshard", partial(fsdp2, reshard=True)),
    Contender("FSDP2", "keep", partial(fsdp2, reshard=False)),
    Contender("HSDP", "reshard", partial(fsdp2, reshard=True, hybrid=True), nodes=True),
    Contender("HSDP", "keep", partial(fsdp2, reshard=False, hybrid=True), nodes=True),
    *(Contender("DeepSpeed", f"ZeRO-{stage}", partial(deepspeed, stage=stage)) for stage in (1, 2, 3)),
    Contender("fullshard", "zero3", partial(fullshard, strategy="zero3")),
    Contender("fullshard", "zero2", partial(fullshard, strategy="zero2")),
    Contender("fullshard", "hybrid", partial(fullshard, strategy="hybrid"), nodes=True),
    Contender("fullshard", "replicate", partial(fullshard, strategy="replicate")),
    Contender("DDP", "", partial(ddp, bf16_gradients=True), "bf16 gradients"),
    Contender("FSDP2", "reshard", partial(fsdp2, reshard=True, reduce_dtype=BF16), "bf16 gradients"),
    Contender("FSDP2", "keep", partial(fsdp2, reshard=False, reduce_dtype=BF16), "bf16 gradients"),
    Contender(
        "HSDP", "reshard",
        partial(fsdp2, reshard=True, hybrid=True, reduce_dtype=BF16), "bf16 gradients", nodes=True,
    ),
    Contender(
        "HSDP", "keep",
        partial(fsdp2, reshard=False, hybrid=True, reduce_dtype=BF16), "bf16 gradients", nodes=True,
    ),
    Contender("fullshard", "zero3", partial(fullshard, strategy="zero3", wire=BF16), "bf16 gradients"),
    Contender("fullshard", "zero2", partial(fullshard, strategy="zero2", wire=BF16), "bf16 gradients"),
    Contender(
        "fullshard", "hybrid", partial(fullshard, strategy="hybrid", wire=BF16), "bf16 gradients", nodes=True
    ),
    Contender(
        "fullshard", "hybrid, bf16 across",
        partial(fullshard, strategy="hybrid", wire=BF16, across=BF16), "bf16 gradients",
        nodes=True, one_rank=True,
    ),
    *(
        Contender(
            "fullshard", f"{strategy}, 8 bits across",
            partial(fullshard, strategy=strategy, wire=BF16, across=torch.int8), "bf16 gradients", nodes=True,
        )
        for strategy in ("zero3", "zero2", "hybrid")
    ),
    Contender(
        "FSDP2", "keep, fp32 sums",
        partial(fsdp2, reshard=False, param_dtype=BF16, reduce_dtype=torch.float32), "bf16",
    ),
    Contender(
        "FSDP2", "keep, bf16 sums",
        partial(fsdp2, reshard=False, param_dtype=BF16, reduce_dtype=BF16), "bf16",
    ),
    Contender(
        "HSDP", "keep, bf16 sums",
        partial(fsdp2, reshard=False, hybrid=True, param_dtype=BF16, reduce_dtype=BF16), "bf16", nodes=True,
    ),
    Contender("fullshard", "zero3", partial(fullshard, strategy="zero3", compute=BF16), "bf16"),
    Contender("fullshard", "zero2", partial(fullshard, strategy="zero2", compute=BF16), "bf16"),
    Contender(
        "fullshard", "hybrid, bf16 across",
        partial(fullshard, strategy="hybrid", compute=BF16, across=BF16), "bf16", nodes=True,
    ),
)  # fmt: skip


def chosen(engines: Sequence[str], precisions: Sequence[str], node_ranks: int = 0) -> list[Contender]:
    """The contenders of these engines and precisions, less those that are not installed.

    node_ranks: ranks per node; 0 for one node.
    """
    missing = set() if importlib.util.find_spec("deepspeed") else {"DeepSpeed"}
    found = [c for c in ALL if c.engine in engines and c.precision in precisions and c.engine not in missing]
    return [c for c in found if not c.nodes or node_ranks > 1 or (node_ranks and c.one_rank)]


# --- the race -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One contender, after the race: a step's seconds by the clock and of one rank's processor time (all its
    threads; what a busy machine disturbs least), bytes one rank sent, and the mean loss at the end."""

    contender: Contender
    step_s: float
    cpu_s: float
    sent_bytes: float
    across_bytes: float  # of those, to other hosts
    loss: float


def join(init_method: str | None, *, rank: int = -1, ranks: int = -1, threads: int) -> None:
    """Make this process a rank; without a method, as its launcher's variables have it."""
    torch.set_num_threads(threads)
    os.environ.setdefault("LOCAL_RANK", str(rank))  # DeepSpeed looks there
    # The rivals warn about views, about themselves and about CPUs: not what is measured.
    warnings.simplefilter("ignore")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=ranks)


def race(contenders: Sequence[Contender], config: GPTConfig, steps: int, warmup: int) -> list[Result]:
    """Every rank calls this, and gets the same results. Raises where the contenders' losses differ."""
    trainers = [_trainer(contender, config) for contender in contenders]
    measured: list[list[list[float]]] = [[] for _ in trainers]
    losses = [torch.zeros(()) for _ in trainers]
    for round_number, batch in enumerate(batches(steps + warmup, config)):
        for turn in range(len(trainers)):
            # Another one begins each round: what comes first after the big one finds other caches.
            index = (turn + round_number) % len(trainers)
            figures, losses[index] = _timed(trainers[index], batch)
            if round_number >= warmup:
                measured[index].append(figures)
    # Contenders, steps, (seconds, processor seconds, bytes): of the slowest rank, and the median step.
    figures_by_step = torch.tensor(measured, dtype=torch.float64)
    dist.all_reduce(figures_by_step, dist.ReduceOp.MAX)
    all_losses = torch.stack(losses).double()
    dist.all_reduce(all_losses)
    medians = figures_by_step.quantile(0.5, dim=1).tolist()
    means = (all_losses / dist.get_world_size()).tolist()
    results = [Result(c, *figures, loss) for c, figures, loss in zip(contenders, medians, means, strict=True)]
    _check_losses(results)
    return results


def _trainer(contender: Contender, config: GPTConfig) -> Trainer:
    torch.manual_seed(0)
    return contender.make(GPT(config))


def batches(count: int, config: GPTConfig) -> list[tuple[Tensor, Tensor]]:
    """Random pieces of the standard library's source, and the same pieces one byte later."""
    source = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    text = torch.frombuffer(bytearray(source[: 1 << 18]), dtype=torch.uint8)
    dice = torch.Generator().manual_seed(1 + dist.get_rank())
    found = []
    for _ in range(count):
        starts = torch.randint(len(text) - config.context - 1, (BATCH,), generator=dice)
        pieces = torch.stack([text[start : start + config.context + 1] for start in starts.tolist()]).long()
        found.append((pieces[:, :-1], pieces[:, 1:]))
    return found


def _timed(trainer: Trainer, batch: tuple[Tensor, Tensor]) -> tuple[list[float], Tensor]:
    sent, across = wire.sent_bytes()
    dist.barrier()
    start, cpu = perf_counter(), process_time()
    loss = trainer.step(*batch)
    seconds, cpu_s = perf_counter() - start, process_time() - cpu
    all_sent, all_across = wire.sent_bytes()
    return [seconds, cpu_s, all_sent - sent, all_across - across], loss


def _check_losses(results: Sequence[Result]) -> None:
    base = next((r.loss for r in results if r.contender.precision == "fp32"), results[0].loss)
    for result in results:
        if not abs(result.loss - base) <= TOLERANCE[result.contender.precision] * abs(base):
            found = ", ".join(f"{r.contender.name} {r.loss:.5f}" for r in results)
            raise RuntimeError(f"the contenders disagree on the loss: {found}")


# --- the table ----------------------------------------------------------------------------------------

RIVALS = ("DDP", "FSDP2")


def table(results: Sequence[Result], rivals: Sequence[str] = RIVALS) -> str:
    """A row a contender; ratios are to the fastest of a rival in the same precision."""
    across = any(result.across_bytes for result in results)
    headers = ["engine", "precision", "ms/step", *(f"to {rival}" for rival in rivals), "CPU ms", "MB sent"]
    rows = []
    for result in results:
        name = f"{result.contender.engine} {result.contender.setting}".strip()
        ratios = [_ratio(result, results, engine) for engine in rivals]
        times = f"{result.step_s * 1e3:.1f}", *ratios, f"{result.cpu_s * 1e3:.1f}"
        sent = [f"{count / 1e6:.2f}" for count in (result.sent_bytes, result.across_bytes)]
        rows.append([name, result.contender.precision, *times, *sent[: 1 + across]])
    return report.markdown([*headers, "MB across"][: len(rows[0])], rows)


def _ratio(result: Result, results: Sequence[Result], engine: str) -> str | None:
    kin = [r for r in results if r.contender.precision == result.contender.precision]
    base = min((r.step_s for r in kin if r.contender.engine == engine), default=None)
    return None if base is None else f"{result.step_s / base:.2f}"
