"""What in_flight between ranks: 8-bit blocks, their error bounds, and training with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import engines
import ranks
import tables
from fullshard.planning.decoder import Decoder
from fullshard.tools.simulation.presets import gpt

INT8 = {
    "gather": {"gather": torch.int8},
    "gradients": {"wire": torch.int8},
    "both": {"gather": torch.int8, "wire": torch.int8},
    "both, bf16": {"gather": torch.int8, "wire": torch.int8, "compute": torch.bfloat16},
}


def _net() -> Decoder:
    """A small GPT, whose forward returns the loss."""
    torch.manual_seed(0)
    return Decoder(gpt(layers=3, width=48, heads=4, vocabulary=64, context=16))


def _batch(step: int, rank: int) -> torch.Tensor:
    """Sequences with a rule to learn: each token follows from the one before it."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    first = torch.randint(0, 64, (16, 1), generator=generator)
    return (first + 7 * torch.arange(9)) % 64


def _full_values(said: dict[str, object], strategy: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Each unit's parameters as its forward sees them, and as they are at rest."""
    import fullshard as fs

    model = fs.shard(_net(), precision=fs.Precision(**said), strategy=strategy)
    seen: list[torch.Tensor] = []
    for block in model.blocks:
        block.feed.up.register_forward_pre_hook(lambda m, _: seen.append(m.weight.detach().float().clone()))
    model(_batch(0, 0))
    with fs.full(model, writeback=False):
        true = [block.feed.up.weight.detach().clone() for block in model.blocks]
    return seen, true


@tables.in_turn(("num_ranks", "strategy"), [2, 3], ["zero3", "zero2"])
def test_8_bit_gather_is_within_half_a_step_of_its_block_and_at_rest_nothing_is_lost(
    num_ranks: int, strategy: str
) -> None:
    for seen, true in ranks.run(_full_values, num_ranks, INT8["gather"], strategy, timeout_s=60):
        assert seen, "the hook saw no forward"
        plain = [block.feed.up.weight for block in _net().blocks]
        for value, exact, built in zip(seen, true, plain, strict=True):
            assert torch.equal(exact, built), "the shard keeps every bit"
            bound = exact.abs().max() / 127 / 2 * 1.02  # a block's largest value is at most the whole's
            assert (value - exact).abs().max() <= bound
            assert not torch.equal(value, exact), "nothing was quantised"


def _gradients(said: dict[str, object]) -> list[torch.Tensor]:
    import fullshard as fs

    model = fs.shard(_net(), precision=fs.Precision(**said))
    rank = torch.distributed.get_rank()
    model(_batch(0, rank)).backward()
    shards = [p.grad.detach().clone() for p in model.parameters()]
    lanes = model._fullshard.lanes
    index = {
        id(p): (lane, piece)
        for lane in lanes
        for p, piece in zip(lane.parameters, lane.layout.pieces, strict=True)
    }
    kept = []
    for parameter, shard in zip(model.parameters(), shards, strict=True):
        lane, piece = index[id(parameter)]
        start, stop = lane.layout.kept(piece, lane.comm.rank)
        kept.append((start, stop, torch.Tensor(shard).flatten()[: stop - start]))
    return kept


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_8_bit_gradients_are_within_half_a_step_of_each_ranks_block(num_ranks: int) -> None:
    found = ranks.run(_gradients, num_ranks, INT8["gradients"], timeout_s=60)
    model = _net()
    locals_: list[list[torch.Tensor]] = []
    for rank in range(num_ranks):
        model.zero_grad()
        model(_batch(0, rank)).backward()
        locals_.append([p.grad.clone().flatten() for p in model.parameters()])
    wrong = 0
    for rank, kept in enumerate(found):
        for i, (start, stop, values) in enumerate(kept):
            mean = sum(mine[i] for mine in locals_) / num_ranks
            bound = sum(float(mine[i].abs().max()) for mine in locals_) / num_ranks / 127 / 2 * 1.02
            error = (values - mean[start:stop]).abs().max() if stop > start else torch.zeros(())
            assert error <= bound + 1e-9, (rank, i)
            wrong += int(error > 0)
    assert wrong, "nothing was quantised"


def _train(configurations: list[dict[str, object]], steps: int) -> list[list[float]]:
    import fullshard as fs

    found, rank = [], torch.distributed.get_rank()
    for said in configurations:
        model = fs.shard(_net(), precision=fs.Precision(**said))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for step in range(steps):
            loss = model(_batch(step, rank))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        found.append(losses)
    return found


@pytest.mark.long
def test_training_with_8_bit_wires_ends_where_the_full_wire_does() -> None:
    plain: list[dict[str, object]] = [{}, {"compute": torch.bfloat16}]
    found = ranks.run(_train, 2, plain + list(INT8.values()), 300, init=True, timeout_s=200)[0]
    ends = [sum(losses[-20:]) / 20 for losses in found]
    assert ends[0] < 0.2 < found[0][0], "the reference learns"
    for name, end in zip(INT8, ends[2:], strict=True):
        reference = ends[1] if "bf16" in name else ends[0]
        assert end < reference * 1.25 + 0.01, (name, end, reference)


def _infinite(said: dict[str, object]) -> tuple[bool, bool]:
    import fullshard as fs

    model = fs.shard(_net(), precision=fs.Precision(**said))
    loss = model(_batch(0, 0))
    (loss * (float("inf") if torch.distributed.get_rank() == 1 else 1.0)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    broken = not bool(torch.isfinite(norm))
    model.zero_grad()
    model(_batch(1, 0)).backward()
    return broken, bool(torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))


def test_infinite_gradient_of_one_rank_is_seen_by_all_and_does_not_stay_in_the_residual() -> None:
    assert ranks.run(_infinite, 2, INT8["gradients"], init=True, timeout_s=60) == [(True, True)] * 2


def _scattered(said: dict[str, object]) -> list[float]:
    import fullshard as fs

    model = engines.shard_blocks(_net(), **said)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rank, losses = torch.distributed.get_rank(), []
    for step in range(6):
        if step % 2:
            with fs.accumulate(model):
                (model(_batch(step + 50, rank)) / 2).backward()
        loss = model(_batch(step, rank))
        loss.backward()
        losses += [float(loss.detach()), float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))]
        optimizer.step()
        optimizer.zero_grad()
    return losses


@tables.in_turn(
    ("precision", "strategy"), ["fp32", "bf16"], ["zero3", "zero2", "replicate", "zero1"], always=1
)
def test_scattered_gradients_are_those_that_are_exchanged(strategy: str, precision: str) -> None:
    said = {"strategy": strategy, "precision": precision}
    exchanged = ranks.run(_scattered, 3, {**said, "reduce": "exchange"}, init=True, timeout_s=60)
    scattered = ranks.run(_scattered, 3, {**said, "reduce": "scatter"}, init=True, timeout_s=60)
    for a, b in zip(exchanged, scattered, strict=True):
        assert b == pytest.approx(a, rel=1e-4 if precision == "fp32" else 1e-2)
