"""`fs.inference`: units stay full, ranks go their own ways, and training goes on as if nothing had been."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engines
import ranks
from engines import Net, batch, build, my_rank, sgd

BF16 = {"precision": "bf16"}
EIGHT_BIT = "8 bit"
CASES: list[dict[str, Any]] = [
    {},
    {"strategy": "zero2"},
    {"strategy": "zero1", **BF16},
    {"strategy": "replicate"},
    {"strategy": "replicate", **BF16},
    {"checkpoint_activations": True, **BF16},
    {"precision": EIGHT_BIT},
]
MEMORY: list[Any] = ["all", 0, 2400]  # nothing, or the head and some of the three blocks


def _shard(model: nn.Module, said: dict[str, Any]) -> nn.Module:
    import fullshard as fs

    if said.get("precision") == EIGHT_BIT:
        said = {**said, "precision": fs.Precision(gather=torch.int8)}
    return engines.shard_blocks(model, **said)


def _plain_loss(step: int, rank: int) -> float:
    with torch.no_grad():
        return float(engines.loss_of(build(), batch(step, rank)))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, between: Callable[[], Any]) -> float:
    loss = engines.loss_of(model, batch(step, my_rank()))
    between()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _evaluated(model: nn.Module, memory: Any) -> list[Tensor]:
    """Rank 0 makes one forward, rank 1 three."""
    import fullshard as fs

    with fs.inference(model, memory=memory) as kept:
        assert kept.everything == (memory == "all" or kept.num_bytes == sum(_sizes(model)))
        return [model(batch(step, 7)[0]) for step in range(1 + 2 * my_rank())]


def _sizes(model: nn.Module) -> list[int]:
    return [unit.full_bytes for unit in model._fullshard.units]


def _train(said: dict[str, Any], memory: Any) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
    """Two steps, with evaluations before, between forward and backward, between micro-batches, and behind."""
    import fullshard as fs

    model = _shard(build(), said)
    optimizer = sgd(model.parameters())

    def look() -> list[Tensor]:
        return _evaluated(model, memory) if memory is not None else []

    look()
    losses = [_step(model, optimizer, 0, look)]
    with fs.accumulate(model):
        engines.loss_of(model, batch(8, my_rank())).backward()
        look()
        engines.loss_of(model, batch(9, my_rank())).backward()
    losses += [_step(model, optimizer, 1, lambda: None)]
    outputs = look()
    return losses, engines.whole("fullshard", model), outputs


def _all_cases(cases: list[dict[str, Any]]) -> list[Any]:
    return [[_train(said, memory) for memory in (None, *MEMORY)] for said in cases]


@pytest.mark.parametrize("case", range(len(CASES)), ids=[str(case) for case in CASES])
def test_training_around_inference_is_bit_identical_and_outputs_are_those_of_one_process(case: int) -> None:
    for rank, [found] in enumerate(ranks.run(_all_cases, 2, [CASES[case]], timeout_s=120)):
        losses, parameters, _ = found[0]
        plain = build()
        plain.load_state_dict(parameters)
        exact = "precision" not in CASES[case]
        for other_losses, other_parameters, outputs in found[1:]:
            assert other_losses == losses
            assert all(torch.equal(other_parameters[name], parameters[name]) for name in parameters)
            assert len(outputs) == 1 + 2 * rank
            for step, output in enumerate(outputs):
                assert not output.requires_grad
                want = plain(batch(step, 7)[0])
                torch.testing.assert_close(output.float(), want, rtol=0, atol=1e-6 if exact else 0.08)


def _on_nodes(strategy: str) -> tuple[list[float], dict[str, Tensor], list[Tensor], dict[str, Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh

    names = ("replicate" if strategy == "hybrid" else "node", "shard")
    said = {"strategy": strategy, "mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=names)}
    expected = _train(said, None)
    losses, parameters, outputs = _train(said, 2400)
    assert losses == expected[0]
    return losses, parameters, outputs, expected[1]


@pytest.mark.parametrize("strategy", ["hybrid", "zero3"])
def test_inference_on_nodes_leaves_training_as_it_was(strategy: str) -> None:
    for _, parameters, outputs, expected in ranks.run(_on_nodes, 4, strategy, init=True, timeout_s=120):
        assert all(torch.equal(parameters[name], expected[name]) for name in expected)
        plain = build()
        plain.load_state_dict(expected)
        torch.testing.assert_close(outputs[0], plain(batch(0, 7)[0]))


# --- ranks that do not wait for each other -------------------------------------------------------------


def _one_after_the_other() -> tuple[int, int]:
    """Rank 1 begins when rank 0 has left, which it could not if a forward of rank 0 needed it."""
    import torch.distributed as dist

    import fullshard as fs

    model = engines.shard_blocks(build())
    token = torch.zeros(1)
    if my_rank() == 0:
        with fs.inference(model) as kept:  # this machine has room for it all
            for step in range(4):
                model(batch(step, 0)[0])
        dist.send(token, 1)
    else:
        with fs.inference(model) as kept:
            dist.recv(token, 0)
            model(batch(0, 0)[0])
    held = sum(lane.full.untyped_storage().nbytes() for lane in model._fullshard.lanes)
    assert kept.everything
    return held, kept.num_bytes


def test_ranks_need_nothing_of_each_other_where_everything_stays_full_and_leaving_frees_it() -> None:
    for held, kept in ranks.run(_one_after_the_other, 2, init=True):
        assert held == 0
        assert kept >= sum(p.numel() * 4 for p in build().parameters())


class _Halves(nn.Module):
    """As an encoder-decoder: what one pass needs is half of it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(engines.block() for _ in range(2))
        self.decoder = nn.ModuleList(engines.block() for _ in range(2))

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        if encoded is None:
            encoded = self.encoder[1](self.encoder[0](x))
        for layer in self.decoder:
            x = layer(x + encoded)
        return x


def _different_paths() -> tuple[list[Tensor], list[str]]:
    import fullshard as fs

    model = engines.shard_blocks(build(_Halves))
    gathered: list[str] = []
    line = model._fullshard.comm.shard_group
    gather = line.gather

    def count(full: Tensor, own: Tensor, tag: Any) -> Any:
        gathered.append(tag.unit)
        return gather(full, own, tag)

    line.gather = count
    x = batch(0, 0)[0]
    with fs.inference(model, memory=0) as kept:
        assert not kept.everything
        encoded = model.encoder[1](model.encoder[0](x))  # a part, called by itself
        outputs = [model(x + step, encoded) for step in range(1 + 3 * my_rank())]
        assert all(unit.state.value != "full" for unit in model._fullshard.units if unit.lanes)
    return outputs, gathered


def test_units_that_do_not_stay_full_are_gathered_for_the_ranks_that_need_them_alone() -> None:
    plain = build(_Halves)
    x = batch(0, 0)[0]
    (one, gathered), (four, also) = ranks.run(_different_paths, 2)
    assert (len(one), len(four)) == (1, 4)
    for step, output in enumerate(four):
        torch.testing.assert_close(output, plain(x + step, plain.encoder[1](plain.encoder[0](x))))
    assert gathered == also  # in one order on both ranks
    names = [name for name in gathered if name]
    assert [names.count(f"encoder.{i}") for i in range(2)] == [1, 1]
    assert [names.count(f"decoder.{i}") for i in range(2)] == [4, 4]


def _merged_and_tied() -> list[Tensor]:
    import fullshard as fs

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Embedding(16, 8)
            self.blocks = nn.ModuleList(engines.block() for _ in range(4))
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.token.weight

        def forward(self, x: Tensor) -> Tensor:
            h = self.token(x)
            for layer in self.blocks:
                h = h + layer(h)
            out: Tensor = self.head(h)
            return out

    model = build(Tied)
    plain = copy.deepcopy(model)
    fs.shard(model, merge_units=2000)
    assert any(unit.merged for unit in model._fullshard.units)
    x = torch.arange(6)
    for memory in ("all", 0):
        with fs.inference(model, memory=memory):
            for _ in range(1 + my_rank()):
                torch.testing.assert_close(model(x), plain(x))
            with fs.inference(model):  # nested: the outer one decides
                torch.testing.assert_close(model(x), plain(x))
            twin = copy.deepcopy(model)
            assert model(x).grad_fn is None
        torch.testing.assert_close(twin(x), plain(x))
        with fs.inference(model.blocks[1], memory="all") as kept:
            assert kept.units == 1
            torch.testing.assert_close(model(x), plain(x))
        with fs.full(model, writeback=False), fs.inference(model) as kept:
            assert kept.everything
            torch.testing.assert_close(model(x), plain(x))
    return [model(x).detach()]


def test_merged_tied_nested_copied_partial_and_whole_models_compute_inside_inference() -> None:
    first, second = ranks.run(_merged_and_tied, 2)
    assert torch.equal(first[0], second[0])


# --- what is refused -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _refused(words: str) -> Iterator[None]:
    from fullshard.errors import OptionError, StateError

    with pytest.raises((StateError, OptionError), match=words) as caught:
        yield
    assert caught.value.remedy


class _Opening(Net):
    def forward(self, x: Tensor) -> Tensor:
        import fullshard as fs

        with fs.inference(self):
            return super().forward(x)


def _mistake(_: Tensor) -> None:
    raise ZeroDivisionError("in a hook of the user's")


def _refusals() -> float:
    import fullshard as fs

    model = engines.shard_blocks(build(), precision="bf16")
    optimizer = sgd(model.parameters())
    x = batch(0, 0)[0]
    loss = engines.loss_of(model, batch(0, my_rank()))
    before = engines.whole("fullshard", model)
    with fs.inference(model):
        with _refused("optimizer.step.. inside fs.inference"):
            optimizer.step()
        with _refused("backward inside fs.inference"):
            loss.backward()
        with _refused("is open already"), fs.inference(model, memory="all"):
            pass
        with torch.enable_grad(), _refused("records gradients inside fs.inference"):
            model(x)
        model(x)
    handle = model.blocks[1][0].weight.register_hook(_mistake)
    with pytest.raises(ZeroDivisionError):
        engines.loss_of(model, batch(0, my_rank())).backward()
    handle.remove()
    with fs.inference(model):  # a backward that failed is over
        model(x)
    with fs.inference(model):
        model.load_state_dict(before)
        with _refused("parameters changed inside fs.inference"):
            model(x)
    first = next(p for p in model.parameters() if p.numel())
    kept = first.detach().clone()
    with fs.inference(model):
        first.data.mul_(2.0)  # an average swapped in, and out again
        with _refused("changed through p.data"):
            model(x)
        first.data.copy_(kept)
    with _refused("changed through p.data"), fs.inference(model):
        model.__dict__["_fullshard"].gathering.inference._reports_at_once = False  # as on a GPU
        first.data.mul_(2.0)
        model(x)
        first.data.copy_(kept)  # out again before leaving
    with _refused("changed through p.data"), fs.inference(model):
        first.data.view(-1)[0] += 1.0
        model(x)
    first.data.copy_(kept)
    with fs.inference(model):
        model(x)
        model.load_state_dict(before)  # behind the last forward: harms nothing
    for bad in (-1, "some", True, 1.5):
        with _refused("memory is"), fs.inference(model, memory=bad):  # type: ignore[arg-type]
            pass
    with _refused("is not sharded"), fs.inference(build()):
        pass
    with _refused("inside a forward"):
        engines.shard_blocks(build(_Opening))(x)
    with fs.full(model.head), _refused("a part of the model"), fs.inference(model):
        pass
    return _step(model, optimizer, 0, lambda: None)


def test_changes_and_backward_inside_inference_are_refused_by_name_and_training_goes_on() -> None:
    first, second = ranks.run(_refusals, 2, timeout_s=120)
    assert first == pytest.approx(_plain_loss(0, 0), abs=0.05)
    assert second == pytest.approx(_plain_loss(0, 1), abs=0.05)


def _one_rank_fails(memory: Any) -> tuple[float, int]:
    import fullshard as fs

    model = engines.shard_blocks(build())
    optimizer = sgd(model.parameters())
    done = 0
    with contextlib.suppress(ValueError), fs.inference(model, memory=memory):
        for step in range(4):
            model(batch(step, 0)[0])
            done += 1
            if my_rank() == 0 and step == 1:
                raise ValueError("a mistake on one rank")
    return _step(model, optimizer, 0, lambda: None), done


def _failures() -> list[tuple[float, int]]:
    return [_one_rank_fails(memory) for memory in ("all", 0)]


def test_an_error_that_one_rank_catches_around_inference_leaves_the_others_in_step() -> None:
    for rank, found in enumerate(ranks.run(_failures, 2)):
        want = _plain_loss(0, rank)
        assert [done for _, done in found] == [2, 2] if rank == 0 else [4, 4]
        assert [loss for loss, _ in found] == pytest.approx([want, want])


def _decode_alone() -> None:

    model = engines.shard_blocks(build())
    with torch.no_grad():
        for step in range(2 + 3 * my_rank()):
            model(batch(step, 0)[0])


def test_different_numbers_of_passes_outside_inference_are_an_error_that_names_it() -> None:
    errors = ranks.run(_decode_alone, 2, expect_error=True, fresh=True)
    assert errors[1].type_name == "Stalled"
    assert "fs.inference(model)" in errors[1].message


def _one_rank_enters() -> None:
    import torch.distributed as dist

    import fullshard as fs

    model = engines.shard_blocks(build())
    if my_rank() == 0:
        with fs.inference(model):
            model(batch(0, 0)[0])
    dist.barrier()


@pytest.mark.long
def test_inference_that_one_rank_enters_alone_is_an_error_in_seconds() -> None:
    errors = ranks.run(_one_rank_enters, 2, expect_error=True, init=True, timeout_s=30)
    assert errors[0].type_name == "Stalled"


# --- evaluation with uneven batches --------------------------------------------------------------------


def _evaluate_uneven() -> tuple[float, float, int]:
    """The mean loss over all samples of all ranks, once with even_batches and once inside fs.inference."""
    import torch.distributed as dist

    import fullshard as fs

    model = fs.shard(build()).eval()
    mine = [batch(step, my_rank()) for step in range(2 + 2 * my_rank())]
    sums = torch.zeros(2, 2)
    repeats = 0
    batches = fs.even_batches(mine, model)
    with torch.no_grad():
        for piece in batches:
            loss = engines.loss_of(model, piece)
            if batches.repeated:
                repeats += 1
            else:
                sums[0] += torch.tensor([float(loss), 1.0])
    assert not batches.repeated
    with fs.inference(model):
        for piece in mine:
            sums[1] += torch.tensor([float(engines.loss_of(model, piece)), 1.0])
        again = fs.even_batches(mine, model)
        assert sum(not again.repeated for _ in again) == len(mine)
    with fs.inference(model, memory=0), pytest.raises(fs.FullshardError, match="even_batches inside"):
        next(fs.even_batches(mine, model))
    dist.all_reduce(sums)
    return float(sums[0, 0] / sums[0, 1]), float(sums[1, 0] / sums[1, 1]), repeats


def test_uneven_evaluation_ends_on_all_ranks_with_the_mean_of_one_process() -> None:
    losses = [_plain_loss(step, rank) for rank in range(2) for step in range(2 + 2 * rank)]
    for rank, (even, own, repeats) in enumerate(ranks.run(_evaluate_uneven, 2, init=True)):
        assert even == own == pytest.approx(sum(losses) / len(losses))
        assert repeats == (2 if rank == 0 else 0)


def _left_early() -> list[float]:
    """A loop that is left while this rank is absent: the next step must count again."""
    import fullshard as fs

    model = fs.shard(build())
    for step, _ in enumerate(fs.even_batches([0] * (1 + 2 * my_rank()), model)):
        if step == 1:
            break
    engines.loss_of(model, batch(0, my_rank())).backward()
    return [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]


def test_leaving_even_batches_early_ends_the_absence_of_a_rank_at_once() -> None:
    plain = build()
    sum(engines.loss_of(plain, batch(0, rank)) / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
    want = [float(p.grad.norm()) for p in plain.parameters() if p.grad is not None]
    for found in ranks.run(_left_early, 2):
        assert found == pytest.approx(want, rel=1e-5)
