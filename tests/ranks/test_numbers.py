"""The numbers of one process: every strategy, on 1 to 4 ranks, against the same training unsharded.

All configurations of one rank count run in one launch, one after the other; the tests below look at what
came back. A step's global batch has 36 rows, so that it splits in equal parts over 1, 2, 3 or 4 ranks and
over 3 micro-batches on each, and one reference serves them all.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ranks
import reference
from reference import Trace

STRATEGIES = ("replicate", "zero1", "zero2", "zero3")
RANK_COUNTS = (1, 2, 3, 4)
MESHES = {1: ("1x1",), 2: ("1x2", "2x1"), 3: ("3x1", "1x3"), 4: ("2x2", "1x4", "4x1")}
ROWS, LENGTH, WORDS, WIDTH = 36, 5, 17, 12
STEPS = 3
MICRO_BATCHES = 3
CLIP = 0.1  # well below the norms of all steps
INF_STEP = 1
FIRST_SCALE = 2.0**10
BLOCK_BYTES = 6000  # of one block at fp32: the last one stays full from forward to backward


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 31), nn.Linear(31, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return out


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text) + self.places
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def build() -> Gpt:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Gpt()


def batch(step: int, rank: int, num_ranks: int, micro_batches: int) -> list[Tensor]:
    """This rank's micro-batches of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = torch.randint(0, WORDS, (ROWS, LENGTH + 1), generator=generator)
    return list(rows.chunk(num_ranks)[rank].chunk(micro_batches))


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())


@dataclass(frozen=True)
class Case:
    """One training run. `mesh` is RxS, for hybrid alone; a GradScaler goes with fp16 alone."""

    strategy: str
    mesh: str = ""
    precision: Any = "fp32"
    prefetch: bool = True
    checkpoint: bool = False
    micro_batches: int = 1
    postpone: bool = False
    again: int = 0
    defaults: bool = False  # one unit, kept full, as a user gets it for a model of this size

    def __str__(self) -> str:
        said = [self.strategy, self.mesh, str(PRECISION_NAMES.get(self.precision, self.precision))]
        said += [] if self.prefetch else ["no_prefetch"]
        said += ["checkpoint"] if self.checkpoint else []
        said += [f"{self.micro_batches}_micro"] if self.micro_batches > 1 else []
        said += ["postponed"] if self.postpone else []
        said += ["defaults"] if self.defaults else []
        return "-".join(s for s in said if s)


def _precisions() -> dict[Any, str]:
    import fullshard as fs

    bf16, fp32 = torch.bfloat16, torch.float32
    return {
        fs.Precision(compute=bf16, wire=fp32): "bf16_wire_fp32",
        fs.Precision(compute=bf16, outputs=fp32): "bf16_outputs_fp32",
        fs.Precision(wire=bf16): "fp32_wire_bf16",
        fs.Precision(compute=fp32, wire=fp32, reduce=torch.float64): "fp32_reduce_fp64",
    }


PRECISION_NAMES = _precisions()


@dataclass(frozen=True)
class Result:
    trace: Trace
    dtypes: dict[str, set[torch.dtype]]
    scales: list[float] = field(default_factory=list)
    logits: torch.dtype | None = None


def all_cases(num_ranks: int) -> list[Case]:
    """Everything on two ranks; on one, three and four what the number of ranks could change."""
    everything = num_ranks == 2
    plain = [Case(strategy) for strategy in STRATEGIES]
    defaults = [replace(case, defaults=True) for case in plain]
    hybrid = [Case("hybrid", mesh) for mesh in ("", *MESHES[num_ranks])]
    variants = [
        replace(case, precision=precision, prefetch=prefetch, checkpoint=checkpoint)
        for case in plain
        for precision in ("fp32", "bf16")
        for prefetch in (True, False)
        for checkpoint in (False, True)
        if everything or (prefetch != checkpoint and precision == "fp32")
    ]
    accumulating = [
        replace(case, micro_batches=MICRO_BATCHES, postpone=postpone, again=again)
        for case in plain + hybrid[-1:]
        for postpone in (False, True)
        for again in (0, 1)
    ]
    low = [replace(case, precision=p) for case in plain + hybrid[-1:] for p in ("bf16", "fp16")]
    chosen = [Case(s, precision=p) for s in ("zero1", "zero3") for p in PRECISION_NAMES if everything]
    return list(dict.fromkeys(plain + defaults + hybrid + variants + accumulating + low + chosen))


def is_core(num_ranks: int, case: Case) -> bool:
    """Whether a case is in the normal suite; the others are long, and repeat the pairs of options of these.

    On two ranks every pair of strategy, precision, prefetch and checkpoint occurs, and every strategy
    accumulates both ways. On four every value of each occurs, and every mesh; on one and three every
    strategy, and with zero3 every value but, on three, fp16 and the defaults.
    """
    turn = (*STRATEGIES, "hybrid").index(case.strategy) % 2 == num_ranks % 2  # with what varies
    if num_ranks in (1, 3) and case.strategy != "zero3":
        return case == Case(case.strategy, case.mesh)
    if num_ranks == 4 and case.mesh == "1x4":
        return False  # as zero3; on two and three ranks it is tried
    if num_ranks == 3 and (case.precision == "fp16" or case.defaults):
        return False
    if case.again:
        return case.postpone == turn and num_ranks == 2
    if case.micro_batches > 1:
        return case.postpone == turn or num_ranks == 2
    if case.precision in PRECISION_NAMES:
        return case.strategy == "zero3" or case.precision.wire is torch.bfloat16
    if num_ranks == 2:
        return plainly(case) or is_paired(case)
    if case.precision != "fp32" or case.defaults:
        return case.strategy == "zero3" or (case.precision == "bf16") == turn
    return plainly(case) or (turn and case.strategy != "replicate")


def plainly(case: Case) -> bool:
    return case.prefetch and not case.checkpoint


def is_paired(case: Case) -> bool:
    """Eight of 32: the smallest part in which each two of strategy, precision, prefetch and checkpoint have
    all pairs of values."""
    first, second = divmod(STRATEGIES.index(case.strategy), 2)
    low = case.precision == "bf16"
    return (case.prefetch, case.checkpoint) == (first ^ low, second ^ low)


def cases_for(num_ranks: int, core: bool) -> list[Case]:
    return [case for case in all_cases(num_ranks) if is_core(num_ranks, case) == core]


# --- on a rank ----------------------------------------------------------------------------------------


def train_all(cases: list[Case]) -> dict[Case, Result]:
    found = {}
    for case in cases:
        found[case] = train_case(case)
        ranks.end_groups_of_models()
    return found


def train_case(case: Case) -> Result:
    import fullshard as fs

    spike = [False]
    model = build()
    model.head.weight.register_hook(lambda gradient: spiked(gradient) if spike[-1] else gradient)
    model = fs.shard(
        model,
        strategy=case.strategy,
        precision=case.precision,
        mesh=_mesh(case.mesh),
        prefetch=case.prefetch,
        checkpoint_activations=case.checkpoint,
        **({} if case.defaults else {"merge_units": 0, "keep_full": BLOCK_BYTES}),
    )
    low = case.precision != "fp32"
    optimizer = (reference.sgd if low else reference.adamw)(model.parameters())
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    scaler = torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE, enabled=case.precision == "fp16")
    seen: dict[str, set[torch.dtype]] = {"masters": {p.dtype for p in model.parameters()}, "gradients": set()}
    losses, norms, scales = [], [], []
    for step in range(STEPS):
        total = 0.0
        micro_batches = batch(step, rank, num_ranks, case.micro_batches)
        for index, rows in enumerate(micro_batches):
            postponing = case.postpone and index < case.micro_batches - 1
            with fs.accumulate(model) if postponing else contextlib.nullcontext():
                loss = loss_of(model, rows) / case.micro_batches
                spike.append(scaler.is_enabled() and step == INF_STEP and rank == num_ranks - 1)
                scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        seen["gradients"] |= {p.grad.dtype for p in model.parameters() if p.grad is not None}
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), math.inf if low else CLIP))
        norms.append(norm if math.isfinite(norm) else math.inf)  # inf or nan: equal on all ranks either way
        losses.append(total)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    seen["optimizer state"] = {
        value.dtype
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    }
    with torch.no_grad():
        logits = model(batch(0, rank, num_ranks, 1)[0][:, :-1])
    with fs.full(model, writeback=False):
        return Result(Trace(losses, norms, reference.whole_parameters(model)), seen, scales, logits.dtype)


def spiked(gradient: Tensor) -> Tensor:
    """One element is inf: after the sum only the rank that keeps it can see it."""
    gradient = gradient.clone()
    gradient[0, 0] = math.inf
    return gradient


def _mesh(shape: str) -> Any:
    if not shape:
        return None
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    sizes = tuple(map(int, shape.split("x")))
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


# --- what came back, and what must ----------------------------------------------------------------------


@lru_cache
def _results(num_ranks: int, core: bool) -> list[dict[Case, Result]]:
    return ranks.run(train_all, num_ranks, cases_for(num_ranks, core), timeout_s=120.0)  # type: ignore[no-any-return]


def results(num_ranks: int, case: Case) -> list[Result]:
    """Of a case, by rank."""
    return [found[case] for found in _results(num_ranks, is_core(num_ranks, case))]


@lru_cache
def trace_of(num_ranks: int, case: Case) -> Trace:
    """The ranks' traces as one; that they agree on norms and parameters is checked on the way."""
    return reference.combine([result.trace for result in results(num_ranks, case)])


@lru_cache
def expected() -> Trace:
    """The unsharded training in one process, each step on its global batch in one piece."""
    batches = [batch(step, 0, 1, 1) for step in range(STEPS)]
    return reference.train(build(), batches, loss_of, reference.adamw, STEPS, clip=CLIP)


@lru_cache
def mixed(num_ranks: int, precision: torch.dtype, skip: int | None = None) -> Trace:
    """Mixed precision in one process, spelled out: fp32 masters, a low copy computes, fp32 gradient sums."""
    model = build()
    low = copy.deepcopy(model).to(precision)
    optimizer = reference.sgd(model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        with torch.no_grad():
            torch._foreach_copy_(list(low.parameters()), list(model.parameters()))
        for rank in range(num_ranks):
            loss = loss_of(low, batch(step, rank, num_ranks, 1)[0])
            loss.backward()
            total += loss.item() / num_ranks
            for master, computed in zip(model.parameters(), low.parameters(), strict=True):
                assert computed.grad is not None
                gradient = computed.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
                computed.grad = None
        for master in model.parameters():
            assert master.grad is not None
            master.grad.mul_(1.0 / num_ranks)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), math.inf)))
        losses.append(total)
        if step != skip:
            optimizer.step()
        optimizer.zero_grad()
    return Trace(losses, norms, reference.whole_parameters(model))


def select(which: Callable[[Case], bool], again: int = 0) -> Any:
    """Parametrise over all (rank count, case) that `which` picks; `again`: that run a second time."""
    found = [
        pytest.param(
            n, c, id=f"{n}-{c}", marks=[] if is_core(n, replace(c, again=again)) else pytest.mark.long
        )
        for n in RANK_COUNTS
        for c in all_cases(n)
        if which(c) and not c.again
    ]
    assert found
    return pytest.mark.parametrize(("num_ranks", "case"), found)


def same_bits(a: Trace, b: Trace) -> None:
    assert a.losses == b.losses
    assert a.grad_norms == b.grad_norms
    different = [
        name for name in a.parameters if not reference.bitwise(a.parameters[name], b.parameters[name])
    ]
    assert not different


def test_the_clip_of_these_tests_is_active_in_every_step() -> None:
    assert min(expected().grad_norms) > 2 * CLIP


@select(lambda case: case.precision == "fp32" and case.micro_batches == 1)
def test_losses_norms_and_parameters_are_those_of_one_process(num_ranks: int, case: Case) -> None:
    reference.assert_close_trace(trace_of(num_ranks, case), expected())


@select(
    lambda case: case.precision in ("fp32", "bf16") and case.micro_batches == 1 and case.strategy != "hybrid"
)
def test_strategy_prefetch_and_recomputation_change_no_bit(num_ranks: int, case: Case) -> None:
    # Norms are sums over units: with one unit their last bit may be another.
    zero3 = Case("zero3", precision=case.precision, defaults=case.defaults)
    same_bits(trace_of(num_ranks, case), trace_of(num_ranks, zero3))


@pytest.mark.parametrize("num_ranks", RANK_COUNTS)
def test_hybrid_without_a_mesh_on_one_node_is_zero3_bit_for_bit(num_ranks: int) -> None:
    same_bits(trace_of(num_ranks, Case("hybrid")), trace_of(num_ranks, Case("zero3")))


@select(lambda case: case.micro_batches > 1)
def test_accumulation_is_one_batch_to_rounding(num_ranks: int, case: Case) -> None:
    reference.assert_close_trace(trace_of(num_ranks, case), expected())


@select(lambda case: case.micro_batches > 1, again=1)
def test_accumulation_repeats_bit_for_bit(num_ranks: int, case: Case) -> None:
    same_bits(trace_of(num_ranks, case), trace_of(num_ranks, replace(case, again=1)))


@select(lambda case: case.precision == "bf16")
def test_bf16_is_the_spelled_out_mixed_precision_of_one_process(num_ranks: int, case: Case) -> None:
    reference.assert_close_trace(trace_of(num_ranks, case), mixed(num_ranks, torch.bfloat16))


@select(lambda case: case.precision == "bf16" and not case.checkpoint and case.prefetch)
def test_bf16_follows_fp32_within_the_error_of_bf16(num_ranks: int, case: Case) -> None:
    follows(trace_of(num_ranks, case), full_precision(None), torch.finfo(torch.bfloat16).eps)


@select(lambda case: case.precision == "fp16")
def test_fp16_with_an_inf_on_one_rank_follows_fp32_without_that_step(num_ranks: int, case: Case) -> None:
    trace = trace_of(num_ranks, case)
    assert [math.isfinite(norm) for norm in trace.grad_norms] == [step != INF_STEP for step in range(STEPS)]
    follows(trace, full_precision(INF_STEP), torch.finfo(torch.float16).eps)


@select(lambda case: case.precision == "fp16")
def test_an_inf_on_one_rank_halves_the_scale_on_all(num_ranks: int, case: Case) -> None:
    halved = FIRST_SCALE / 2
    for result in results(num_ranks, case):
        assert result.scales == [FIRST_SCALE, halved, halved]


@select(lambda case: True)
def test_masters_gradients_and_optimizer_state_are_fp32(num_ranks: int, case: Case) -> None:
    for result in results(num_ranks, case):
        for what, dtypes in result.dtypes.items():
            assert dtypes == {torch.float32}, what


@select(lambda case: case.precision in PRECISION_NAMES and case.precision.compute is torch.bfloat16)
def test_chosen_bf16_precisions_follow_fp32_within_the_error_of_bf16(num_ranks: int, case: Case) -> None:
    follows(trace_of(num_ranks, case), full_precision(None), torch.finfo(torch.bfloat16).eps)


@select(lambda case: case.precision in PRECISION_NAMES and case.precision.compute is not torch.bfloat16)
def test_a_bf16_wire_rounds_the_gradients_and_nothing_else(num_ranks: int, case: Case) -> None:
    trace, exact = trace_of(num_ranks, case), full_precision(None)
    assert trace.losses[0] == pytest.approx(exact.losses[0], rel=1e-6)
    coarse = case.precision.wire is torch.bfloat16
    follows(trace, exact, torch.finfo(torch.bfloat16).eps if coarse else 1e-6)


@select(lambda case: case.precision == "bf16" or case.precision in PRECISION_NAMES)
def test_outputs_have_the_dtype_asked_for(num_ranks: int, case: Case) -> None:
    precision = case.precision
    asked = torch.bfloat16 if precision == "bf16" else precision.outputs or precision.compute or torch.float32
    assert {result.logits for result in results(num_ranks, case)} == {asked}


@lru_cache
def full_precision(skip: int | None) -> Trace:
    return mixed(1, torch.float32, skip)


def follows(trace: Trace, exact: Trace, eps: float) -> None:
    """The run went where the exact one went, but for a few roundings of the precision a step."""
    for ours, theirs in zip(trace.losses, exact.losses, strict=True):
        assert ours == pytest.approx(theirs, rel=4 * eps)
    start = reference.whole_parameters(build())
    moved = math.sqrt(sum(float((exact.parameters[n] - p).square().sum()) for n, p in start.items()))
    away = math.sqrt(sum(float((exact.parameters[n] - trace.parameters[n]).square().sum()) for n in start))
    assert away < 4 * eps * moved, f"{away / moved:.3g} of the way, where the precision's eps is {eps:.3g}"
