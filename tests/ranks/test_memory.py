"""What a rank holds: at rest its share and alignment, in a step two units and the root, never the whole."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import engines
import ranks
import tables

RANK_COUNTS = (2, 3)
SHARDED = ("zero1", "zero2", "zero3")
BYTES_OF_ALIGNMENT = 16


# --- at rest ------------------------------------------------------------------------------------------


class Uneven(nn.Module):
    """Sizes that nothing divides, three dtypes, frozen beside trainable, a scalar and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self._block() for _ in range(3))
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.table = nn.Parameter(torch.randn(7, 11, dtype=torch.float64))

    @staticmethod
    def _block() -> nn.Module:
        first, last = nn.Linear(13, 29), nn.Linear(29, 13).to(torch.bfloat16)
        frozen = nn.Linear(13, 101).requires_grad_(False)
        return nn.Sequential(first, frozen, last)


def rest_of(strategy: str) -> list[dict[str, Any]]:
    """Of every lane: its sizes, and the bytes of the storages that its parameters lie in on this rank."""

    model = engines.shard_blocks(Uneven(), strategy=strategy)
    found = []
    for lane in model._fullshard.lanes:
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in lane.parameters}
        elements = sum(piece.num_elements for piece in lane.layout.pieces)
        found.append(
            {
                "unit": lane.unit,
                "pieces": len(lane.parameters),
                "whole_bytes": elements * lane.dtypes.rest.itemsize,
                "held_bytes": sum(storages.values()),
                "align_bytes": BYTES_OF_ALIGNMENT * lane.dtypes.rest.itemsize // lane.dtypes.narrowest_bytes,
                "full_bytes": lane.full.untyped_storage().nbytes(),
                "parameters": len({id(p) for p in lane.parameters}),
            }
        )
    found.append({"parameters": len(list(model.parameters())), "unit": None})
    return found


@pytest.mark.parametrize("strategy", [*SHARDED, "replicate", "hybrid"])
@pytest.mark.parametrize("num_ranks", RANK_COUNTS)
def test_every_lane_rests_in_its_share_and_alignment(num_ranks: int, strategy: str) -> None:
    parts = 1 if strategy == "replicate" else num_ranks
    for lanes in ranks.run(rest_of, num_ranks, strategy):
        *lanes, model = lanes
        assert sum(lane["parameters"] for lane in lanes) == model["parameters"]
        assert len(lanes) == 3 * 3 + 2
        for lane in lanes:
            padding = lane["held_bytes"] - lane["whole_bytes"] / parts
            # A lane pads each parameter and each interval to a multiple: less than that many of them, shared.
            allowed = lane["align_bytes"] * (lane["pieces"] + num_ranks) / parts
            assert 0 <= padding < allowed, lane
            if strategy != "replicate":
                assert lane["full_bytes"] == 0, lane


def resting_after(strategy: str, precision: str, what: str) -> dict[str, Any]:
    """Bytes of full values, of postponed and outgoing gradients, after a whole step or an evaluation."""
    import fullshard as fs

    model = engines.shard_blocks(engines.build(), strategy=strategy, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters())
    if what == "evaluation":
        with torch.no_grad():
            engines.loss_of(model, engines.batch(0, 0))
    else:
        with fs.accumulate(model) if what == "accumulated step" else contextlib.nullcontext():
            engines.loss_of(model, engines.batch(0, 0)).backward()
        if what == "accumulated step":
            engines.loss_of(model, engines.batch(1, 0)).backward()
        optimizer.step()
    runtime = model._fullshard
    buffers = [
        buffer.flat.untyped_storage().nbytes()
        for unit in runtime.reduction._units
        for lane in unit
        for buffer in (lane.send_buffer, lane.accumulation)
        if buffer is not None
    ]
    return {
        "full": sum(lane.full.untyped_storage().nbytes() for lane in runtime.lanes if not lane.permanent),
        "buffers": sum(buffers),
        "state": sum(
            v.numel() * v.element_size() for s in optimizer.state.values() for v in s.values() if v.dim()
        ),
        "gradients": distinct_bytes(p.grad for p in model.parameters() if p.grad is not None),
        "rest": distinct_bytes(model.parameters()),
        "elements": sum(p.numel() for p in model.parameters()),
    }


def distinct_bytes(tensors: Any) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def resting_after_all(cases: list[tuple[str, str, str]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {case: resting_after(*case) for case in cases}


RESTING = [
    (strategy, precision, what)
    for strategy in ("zero1", "zero2", "zero3", "hybrid", "replicate")
    for precision in ("fp32", "bf16")
    for what in ("step", "accumulated step", "evaluation")
]


@lru_cache
def resting(num_ranks: int) -> list[dict[tuple[str, str, str], dict[str, Any]]]:
    return ranks.run(resting_after_all, num_ranks, RESTING)  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", RESTING, ids="-".join)
def test_nothing_is_full_or_on_its_way_at_rest(case: tuple[str, str, str]) -> None:
    for found in resting(2):
        assert found[case]["full"] == 0
        assert found[case]["buffers"] == 0


@pytest.mark.parametrize("case", [c for c in RESTING if c[2] == "step"], ids="-".join)
def test_gradients_take_what_parameters_take_and_adam_twice_the_elements(case: tuple[str, str, str]) -> None:
    whole = sum(p.numel() for p in engines.build().parameters())
    parts = 1 if case[0] == "replicate" else 2
    for found in resting(2):
        assert found[case]["gradients"] == found[case]["rest"]
        assert found[case]["state"] == 2 * 4 * found[case]["elements"]
    total = sum(found[case]["elements"] for found in resting(2))
    assert total * parts == 2 * whole  # every element's state on one rank, or on each with replicate


# --- frozen parameters --------------------------------------------------------------------------------


class Adapted(engines.Net):
    """A frozen base with one trainable layer in each block, as adapters train."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith("2.weight"))


def gradient_memory(strategy: str) -> dict[bool, list[bool]]:
    """By trainability of the lane: which lanes have gradient shards or send buffers after a step."""
    import fullshard as fs

    model = engines.shard_blocks(engines.build(Adapted), strategy=strategy)
    with fs.accumulate(model):
        engines.loss_of(model, engines.batch(0, 0)).backward()
    engines.loss_of(model, engines.batch(1, 0)).backward()
    found: dict[bool, list[bool]] = {True: [], False: []}
    for unit in model._fullshard.reduction._units:
        for reduction in unit:
            held = (reduction.lane.gradients, reduction.send_buffer, reduction.accumulation)
            grads = [p.grad for p in reduction.lane.parameters]
            found[any(reduction.lane.trainable)].append(any(h is not None for h in (*held, *grads)))
    return found


@pytest.mark.parametrize("strategy", [*SHARDED, "replicate", "hybrid"])
def test_frozen_parameters_have_no_gradient_buffers(strategy: str) -> None:
    for found in ranks.run(gradient_memory, 2, strategy):
        assert found == {True: [True] * 3, False: [False] * 4}


# --- in a step ----------------------------------------------------------------------------------------


@dataclass
class Watch:
    """Units that are full, looked at after every gather and every release."""

    lanes: dict[str, list[Any]] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    phase: str = "forward"
    gathers: dict[str, int] = field(default_factory=dict)

    def look(self) -> None:
        full = sum(any(lane.full.untyped_storage().nbytes() for lane in unit) for unit in self.lanes.values())
        self.peak[self.phase] = max(self.peak.get(self.phase, 0), full)


@contextlib.contextmanager
def watching(model: nn.Module) -> Iterator[Watch]:
    from fullshard.engine.lane import Lane

    watch = Watch()
    for unit in model._fullshard.units[1:]:  # the root's leftovers are full from forward to backward
        watch.lanes[unit.name] = list(unit.lanes)
    gather, release = Lane.gather, Lane.release

    def watched_gather(lane: Lane, *how: Any) -> None:
        gather(lane, *how)
        watch.gathers[watch.phase] = watch.gathers.get(watch.phase, 0) + (lane.unit != "")
        watch.look()

    def watched_release(lane: Lane) -> None:
        release(lane)
        watch.look()

    Lane.gather, Lane.release = watched_gather, watched_release  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        Lane.gather, Lane.release = gather, release  # type: ignore[method-assign]


class Checkpointed(engines.Net):
    """The caller wraps each block in torch's own activation checkpointing."""

    def __init__(self, num_blocks: int, use_reentrant: bool) -> None:
        super().__init__(num_blocks)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()  # torch's reentrant kind needs an input with a gradient
        for layer in self.blocks:
            x = x + checkpoint(layer, x, use_reentrant=self.use_reentrant)
        out: Tensor = self.head(x)
        return out


BLOCKS = 6
MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": partial(engines.Net, BLOCKS),
    "checkpoint_activations": partial(engines.Net, BLOCKS),
    "torch_checkpoint": partial(Checkpointed, BLOCKS, use_reentrant=False),
    "torch_checkpoint_reentrant": partial(Checkpointed, BLOCKS, use_reentrant=True),
}
STEP_CASES = [
    (kind, strategy, prefetch)
    for kind in MODELS
    for strategy in ("zero3", "hybrid")
    for prefetch in (True, False)
]


def watched_steps(cases: list[tuple[str, str, bool]]) -> dict[tuple[str, str, bool], Watch]:
    return {case: watched_step(*case) for case in cases}


def watched_step(kind: str, strategy: str, prefetch: bool) -> Watch:
    """Two whole steps and an evaluation: the first learns the order, the second follows it."""

    model = engines.shard_blocks(
        engines.build(MODELS[kind]),
        strategy=strategy,
        prefetch=prefetch,
        checkpoint_activations=kind == "checkpoint_activations",
        keep_full=0,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(model) as watch:
        for step in range(3):
            watch.phase = f"forward {step}"
            loss = engines.loss_of(model, engines.batch(step, engines.my_rank()))
            watch.phase = f"backward {step}"
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        watch.phase = "evaluation"
        with torch.no_grad():
            model(engines.batch(0, 0)[0])
        watch.look()
    watch.lanes.clear()
    return watch


@lru_cache
def watches() -> list[dict[tuple[str, str, bool], Watch]]:
    return ranks.run(watched_steps, 2, STEP_CASES)  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", STEP_CASES, ids=lambda c: f"{c[0]}-{c[1]}{'' if c[2] else '-no_prefetch'}")
def test_at_most_two_units_are_full_at_a_time(case: tuple[str, str, bool]) -> None:
    limit = 2 if case[2] else 1
    for found in watches():
        assert set(found[case].peak) == {
            *(f"{p} {s}" for p in ("forward", "backward") for s in range(3)),
            "evaluation",
        }
        assert max(found[case].peak.values()) <= limit, found[case].peak


@pytest.mark.parametrize("kind", MODELS)
def test_prefetch_has_the_next_unit_full_beside_the_one_that_computes(kind: str) -> None:
    for found in watches():
        peak = found[kind, "zero3", True].peak
        # The first forward is still learning the order: nothing is known to ask for.
        assert (peak["forward 1"], peak["backward 1"]) == (2, 2), peak


@pytest.mark.parametrize("case", STEP_CASES, ids=lambda c: f"{c[0]}-{c[1]}{'' if c[2] else '-no_prefetch'}")
def test_a_step_gathers_each_unit_once_forward_and_once_backward(case: tuple[str, str, bool]) -> None:
    for found in watches():
        for phase in ("forward 1", "backward 1", "forward 2", "backward 2", "evaluation"):
            assert found[case].gathers[phase] == BLOCKS, (phase, found[case].gathers)


# --- from the meta device -----------------------------------------------------------------------------

META_BLOCKS, META_WIDTH = 12, 2048  # 12 blocks of 16 MiB: 200 MB in all
M_MMAP_THRESHOLD = -3  # of mallopt(3)


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(META_WIDTH, META_WIDTH), nn.Tanh()) for _ in range(META_BLOCKS)
        )


def peak_growth(strategy: str) -> tuple[int, int]:
    """By how many bytes sharding a meta-device model raised this process's peak memory; the whole's bytes."""
    import fullshard as fs

    # Every large tensor a mapping of its own, gone when freed: the heap's holes are not what is measured.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    fs.shard(nn.Linear(3, 3))  # nor are connections and the package's own memory
    with torch.device("meta"):
        model = Large()
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fs.shard(model, strategy=strategy)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not any(p.is_meta for p in model.parameters())
    return (after - before) * 1024, whole


@tables.some("num_ranks", [2, 4], 2)
def test_a_meta_device_model_is_never_whole_on_a_rank(num_ranks: int) -> None:
    for growth, whole in ranks.run(peak_growth, num_ranks, "zero3", fresh=True, timeout_s=120.0):
        share, unit = whole / num_ranks, whole / META_BLOCKS
        # Its share, and what one unit takes while it is cut: as built, as a lane, as a message; and what
        # threads and connections take.
        assert 0.9 * share < growth < share + 3 * unit + 2**24, f"{growth / whole:.2f} of the whole"
