"""The module stays a module: casts, whole values, copies, several models in one process."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import cases
import ranks
import reference
from cases import (
    ALL,
    Case,
    WithConv,
    assert_close,
    fresh_values,
    refusal,
    same,
    sharded,
    train_step,
    trained_in_one_process,
    whole,
)
from engines import WIDTH, Net, batch, block, build, loss_of, my_rank, shard_blocks

# --- casts, moves, freezing ----------------------------------------------------------------------------

CASTS: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "bfloat16": lambda m: m.bfloat16(),
    "type": lambda m: m.type(torch.float16),
    "to": lambda m: m.to(torch.float64),
    "to meta": lambda m: m.to("meta"),
    "half of a block": lambda m: m.blocks[1].half(),
    "double of a leaf": lambda m: m.head.double(),
}
HARMLESS: dict[str, Callable[[nn.Module], Any]] = {
    "to the same device": lambda m: m.to("cpu"),
    "to the same dtype": lambda m: m.to(torch.float32),
    "float": lambda m: m.float(),
    "cpu": lambda m: m.cpu(),
    "apply": lambda m: m.apply(lambda module: None),
    "eval and train": lambda m: m.eval().train(),
}


def _cast() -> dict[str, Any]:
    found: dict[str, Any] = {"refused": {}, "harmless": {}}
    model = sharded(make=WithConv)
    before = whole(model)
    for name, cast in CASTS.items():
        found["refused"][name] = refusal(lambda cast=cast: cast(model))
        assert same(whole(model), before), f"{name} changed a value"
        assert all(b.dtype != torch.float16 for b in model.buffers()), f"{name} changed a buffer"
    for name, call in HARMLESS.items():
        found["harmless"][name] = (call(model) is model, same(whole(model), before))
    model = sharded()
    model.register_buffer("late", torch.ones(3))
    found["buffer"] = torch.equal(model.state_dict()["late"], torch.ones(3))
    train_step(model)
    found["trained"] = whole(model)
    return found


def test_cast_or_move_of_shards_is_refused_by_name_and_a_no_op_is_not() -> None:
    for found in ranks.run(_cast, 2):
        for name, (kind, message, remedy) in found["refused"].items():
            assert kind == "NotSupported", name
            assert f"{name.split()[0]}()" in message, name
            assert "fs.shard" in remedy, name
        for name, value in found["harmless"].items():
            assert value == (True, True), name
        assert found["buffer"]
        assert_close(found["trained"], trained_in_one_process(range(1)))


def _freeze(model: nn.Module, piece: cases.Piece, weight: float) -> float:
    """Frozen: the first block in the first two steps, the head afterwards, a bias from the third on."""
    model.count = getattr(model, "count", 0) + (1 if weight == 1 else 0.5)
    late = model.count > 2
    model.blocks[0].requires_grad_(late)
    model.head.requires_grad_(not late)
    model.blocks[2][0].bias.requires_grad_(model.count <= 3)
    return cases.plainly(model, piece, weight)


FROZEN = Case(
    backward=_freeze,
    optimizer=lambda ps: torch.optim.SGD(ps, lr=0.2, momentum=0.5, weight_decay=0.1),
    steps=6,
)


def _train_frozen() -> dict[str, cases.Outcome]:
    return {strategy: cases.on_a_rank(FROZEN, strategy=strategy) for strategy in ALL}


def test_freezing_and_unfreezing_after_shard_trains_as_in_one_process() -> None:
    results = ranks.run(_train_frozen, 2)
    for strategy in ALL:
        cases.assert_as_in_one_process(FROZEN, [result[strategy] for result in results])


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 1 / module.weight.shape[1])


def _reinitialise(strategy: str) -> dict[str, Any]:
    """An initialiser that reads the shape sees the whole one, or is refused."""
    from fullshard import FullshardError

    model = sharded(strategy)
    found: dict[str, Any] = {}
    try:
        model.apply(_initialise)
    except FullshardError as error:
        found["apply"] = type(error).__name__
    else:
        found["apply"] = float(whole(model)["blocks.0.0.weight"].sum())
    try:
        torch.manual_seed(my_rank())
        model.head.reset_parameters()
    except FullshardError as error:
        found["reset"] = (type(error).__name__, "reset_parameters" in str(error))
    else:
        found["reset"] = whole(model)["head.weight"]
    return found


@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_initialiser_run_after_shard_sees_whole_values_or_is_refused(strategy: str) -> None:
    first, second = ranks.run(_reinitialise, 2, strategy)
    assert first["apply"] in (13.0, pytest.approx(13.0), "AtRestError", "StateError", "NotSupported")
    assert first["apply"] == second["apply"]
    if isinstance(first["reset"], tuple):
        assert first["reset"] == ("AtRestError", True)
    else:
        assert reference.bitwise(first["reset"], second["reset"]), "ranks hold different values"


# --- functional_call, pickling, replaced parameters ----------------------------------------------------


def _call_functionally() -> dict[str, Any]:
    import fullshard as fs

    model = sharded()
    x = batch(0, 0)[0]
    other = fresh_values(seed=3)
    found: dict[str, Any] = {"outside": refusal(lambda: functional_call(model, other, (x,)))}
    with fs.full(model):
        found["inside"] = functional_call(model, other, (x,)).detach()
    found["pickle"] = refusal(lambda: pickle.dumps(model))
    found["torch.save"] = refusal(lambda: torch.save(model, io.BytesIO()))
    for name in ("head.weight", "blocks.1.0.weight"):
        owner = model.get_submodule(name.rpartition(".")[0])
        original = owner.weight
        owner.weight = nn.Parameter(torch.zeros(3, 3))
        found[f"replaced {name}"] = refusal(lambda: model(x))
        owner.weight = original
    train_step(model)
    found["trained"] = whole(model)
    return found


def test_functional_call_pickling_and_replaced_parameters_are_refused_where_they_cannot_work() -> None:
    for found in ranks.run(_call_functionally, 2):
        assert found["outside"][0] == "AtRestError"
        assert "functional_call" in found["outside"][2]
        assert reference.bitwise(found["inside"], build(seed=3)(batch(0, 0)[0]).detach())
        for what in ("pickle", "torch.save"):
            assert found[what][0] == "NotSupported"
            assert "fs.full" in found[what][2]
        for name in ("head.weight", "blocks.1.0.weight"):
            assert found[f"replaced {name}"][0] == "AtRestError"
            assert name in found[f"replaced {name}"][1]
        assert_close(found["trained"], trained_in_one_process(range(1)))


# --- whole values --------------------------------------------------------------------------------------


def _fill(parameter: Tensor, value: float) -> None:
    with torch.no_grad():
        parameter.fill_(value)


def _edit_whole(strategy: str) -> dict[str, Any]:
    import fullshard as fs

    model = sharded(strategy)
    found: dict[str, Any] = {}
    parameter = model.head.weight
    with fs.full(model) as inside:
        found["same module"] = inside is model
        found["read"] = same(reference.whole_parameters(model), fresh_values())
        found["same object"] = model.head.weight is parameter
        _fill(model.head.weight, 2.0)
        model.head.bias.data = torch.full((5,), 3.0)
        model.blocks[0][0].bias.data.mul_(0).add_(4.0)
    with fs.full(model, writeback=False):
        _fill(model.blocks[1][0].bias, 5.0)
    with fs.full(model.blocks[2]):
        _fill(model.blocks[2][0].bias, 6.0)
        with fs.full(model):
            found["nested"] = same(
                {"a": model.blocks[2][0].bias, "b": model.head.weight},
                {"a": torch.full((13,), 6.0), "b": torch.full((5, WIDTH), 2.0)},
            )
            _fill(model.blocks[2][2].bias, 7.0)
    try:
        with fs.full(model):
            raise KeyError("on purpose")
    except KeyError:
        found["raised"] = parameter.numel() < 40 or strategy == "replicate"
    with fs.full(model, writeback=False):
        found["after"] = reference.whole_parameters(model)
    train_step(model)
    found["trained"] = whole(model)
    return found


def _edited() -> nn.Module:
    plain = build()
    _fill(plain.head.weight, 2.0)
    _fill(plain.head.bias, 3.0)
    _fill(plain.blocks[0][0].bias, 4.0)
    _fill(plain.blocks[2][0].bias, 6.0)
    _fill(plain.blocks[2][2].bias, 7.0)
    return plain


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "replicate"])
def test_edits_inside_full_count_and_without_writeback_do_not(strategy: str) -> None:
    for found in ranks.run(_edit_whole, 2, strategy):
        after, trained = found.pop("after"), found.pop("trained")
        assert all(found.values()), found
        expected = reference.whole_parameters(_edited())
        for name, value in expected.items():
            assert reference.bitwise(after[name], value), name
        assert_close(trained, trained_in_one_process(range(1), _edited()))


def _written_by_other_ways() -> list[str]:
    import fullshard as fs

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for precision in ("fp32", "bf16"):
            model = sharded("replicate", precision=precision)
            before = whole(model)
            with fs.full(model, writeback=False), torch.no_grad():
                model.head.weight.mul_(2)
                model.blocks[0][0].bias.data = torch.ones(13)
                model.blocks[1][0].bias.data.add_(1)
            assert same(whole(model), before)
            with fs.full(model, writeback=False), torch.no_grad():
                loss = loss_of(model, batch(0, 0))
                model.blocks[0][0].bias.data = torch.ones(13)
                assert loss_of(model, batch(0, 0)) != loss
            assert same(whole(model), before)
            assert loss_of(model, batch(0, 0)) == loss
        with fs.full(model, writeback=False):
            torch._foreach_add_([model.blocks[1][0].bias.detach()], 1.0)
        with fs.full(model, writeback=False):
            reference.whole_parameters(model)
    return [str(each.message) for each in caught]


def test_writes_without_writeback_that_cannot_be_undone_are_warned_of_and_no_others() -> None:
    for messages in ranks.run(_written_by_other_ways, 2):
        assert len(messages) == 1
        assert "'blocks.1'" in messages[0]


def _edit_on_rank_zero() -> dict[str, Any]:
    import fullshard as fs

    found: dict[str, Any] = {}
    for strategy in ("zero3", "replicate"):
        model = sharded(strategy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with fs.full(model):
                _fill(model.blocks[1][0].bias, 1.0 + my_rank())
        found[strategy] = (whole(model)["blocks.1.0.bias"], [str(w.message) for w in caught])
    return found


def test_where_ranks_edit_differently_the_first_ranks_values_win_with_a_warning() -> None:
    for found in ranks.run(_edit_on_rank_zero, 2):
        for strategy, (value, said) in found.items():
            assert torch.equal(value, torch.ones(13)), strategy
            assert len(said) == 1, strategy
            assert "blocks.1" in said[0], strategy


class OpensItself(Net):
    def forward(self, x: Tensor) -> Tensor:
        import fullshard as fs

        with fs.full(self):
            return super().forward(x)


def _misuse_full() -> dict[str, Any]:
    import fullshard as fs

    found: dict[str, Any] = {}
    model = sharded(make=OpensItself)
    found["in forward"] = refusal(lambda: model(batch(0, 0)[0]))
    found["not sharded"] = refusal(lambda: fs.full(build()).__enter__())
    model = sharded()
    with fs.full(model):
        x, y = batch(0, my_rank())
        loss = F.cross_entropy(model(x), y)
        found["forward"] = loss.item()
        found["backward"] = refusal(loss.backward)
    train_step(model)
    found["trained"] = whole(model)
    return found


def test_full_inside_forward_and_backward_inside_full_are_refused() -> None:
    for rank, found in enumerate(ranks.run(_misuse_full, 2)):
        for what in ("in forward", "not sharded", "backward"):
            assert found[what][0] == "StateError", what
            assert found[what][2], f"{what} has no remedy"
        assert found["forward"] == pytest.approx(loss_of(build(), batch(0, rank)).item(), rel=1e-6)
        assert_close(found["trained"], trained_in_one_process(range(1)))


# --- copies and several models -------------------------------------------------------------------------


def _copies(strategy: str) -> dict[str, Any]:
    model = sharded(strategy)
    train_step(model)
    twin = copy.deepcopy(model)
    found = {"equal": same(whole(twin), whole(model))}
    found["own memory"] = all(a is not b for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    before = whole(model)
    train_step(twin, 1)
    found["apart"] = same(whole(model), before)
    copied = whole(copy.deepcopy(twin))
    found["copy of a copy"] = same(copied, whole(twin))
    train_step(model, 1)
    found["both train alike"] = same(whole(model), whole(twin))
    return found


@pytest.mark.parametrize("strategy", ALL)
def test_deepcopy_is_an_independent_model_that_trains_alike(strategy: str) -> None:
    for found in ranks.run(_copies, 2, strategy):
        assert all(found.values()), found


def _train_once(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, pieces: list[int]) -> None:
    """One step on these ranks' batches: a rank's own, or in one process those of all."""
    for rank in pieces:
        (loss_of(model, batch(step, rank)) / len(pieces)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _averaged(model: nn.Module, average: nn.Module, pieces: list[int]) -> list[float]:
    """The usual exponential moving average, written by hand, evaluated every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for step in range(3):
        _train_once(model, optimizer, step, pieces)
        with torch.no_grad():
            for averaged, p in zip(average.parameters(), model.parameters(), strict=True):
                averaged.mul_(0.7).add_(p, alpha=0.3)
            losses.append(loss_of(average, batch(9, 0)).item())
    return losses


def _moving_average(strategy: str) -> tuple[list[float], dict[str, Tensor]]:
    model = sharded(strategy)
    average = copy.deepcopy(model).requires_grad_(False)
    losses = _averaged(model, average, [my_rank()])
    return losses, whole(average)


@pytest.mark.parametrize("strategy", ALL)
def test_moving_average_in_a_deepcopy_is_that_of_one_process(strategy: str) -> None:
    model = build()
    average = copy.deepcopy(model)
    losses = _averaged(model, average, [0, 1])
    for found, parameters in ranks.run(_moving_average, 2, strategy):
        assert found == pytest.approx(losses, rel=1e-5)
        assert_close(parameters, reference.whole_parameters(average))


def _tried_out(model: nn.Module, pieces: list[int]) -> list[float]:
    """An average that changes places with the parameters through p.data, and a second model that does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    average = [p.data.clone() for p in model.parameters()]
    losses = []
    for step in range(3):
        _train_once(model, optimizer, step, pieces)
        average = [0.7 * a + 0.3 * p.data for a, p in zip(average, model.parameters(), strict=True)]
        kept = [p.data for p in model.parameters()]
        for p, a in zip(model.parameters(), average, strict=True):
            p.data = a
        with torch.inference_mode():
            losses.append(loss_of(model, batch(9, 0)).item())
        for p, k in zip(model.parameters(), kept, strict=True):
            p.data = k
    return losses


def _changed_places(model: nn.Module, other: nn.Module) -> list[float]:
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        a.data, b.data = b.data, a.data
    with torch.no_grad():
        return [loss_of(m, batch(9, 0)).item() for m in (model, other)]


def _assigned(strategy: str) -> tuple[list[float], list[float], dict[str, Any]]:
    import fullshard as fs

    model, other, found = sharded(strategy), sharded(strategy), {}
    losses = _tried_out(model, [my_rank()])
    places = _changed_places(model, other)
    with fs.inference(other):
        kept = [p.data for p in other.parameters()]
        for p in other.parameters():
            p.data = p.data + 1
        found["inference"] = refusal(lambda: other(batch(9, 0)[0]))[0] == "StateError"
        for p, k in zip(other.parameters(), kept, strict=True):
            p.data = k
    with fs.accumulate(other):
        loss_of(other, batch(0, 0)).backward()
        other.head.weight.data, other.head.bias.data = other.head.weight * 0, other.head.bias * 0
        found["accumulate"] = not other(batch(9, 0)[0]).any()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first rank's values are kept
        with fs.full(model):
            model.head.bias.data = torch.full((5,), float(my_rank()))
    found["full"] = not whole(model)["head.bias"].any()
    return losses, places, found


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "replicate"])
def test_values_assigned_to_data_count_and_leave_what_was_there_to_who_kept_it(strategy: str) -> None:
    model, other = build(), build()
    losses = _tried_out(model, [0, 1])
    places = _changed_places(model, other)
    for tried, changed, found in ranks.run(_assigned, 2, strategy):
        assert tried == pytest.approx(losses, rel=1e-5)
        assert changed == pytest.approx(places, rel=1e-5)
        assert all(found.values()), found


def _discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(5, WIDTH), *(block() for _ in range(2)), nn.Linear(WIDTH, 1))


def _adversarial(generator: nn.Module, critic: nn.Module, pieces: list[int]) -> list[float]:
    """Two models in one graph, each with its own optimizer and its own turn."""
    first = torch.optim.SGD(generator.parameters(), lr=0.1)
    second = torch.optim.SGD(critic.parameters(), lr=0.1)
    norms = []
    for step in range(3):
        for rank in pieces:
            x = batch(step, rank)[0]
            with torch.no_grad():
                fake = generator(x)
            ((critic(x[:, :5]).mean() - critic(fake).mean()) / len(pieces)).backward()
        norms.append(nn.utils.clip_grad_norm_(critic.parameters(), 1.0).item())
        second.step()
        second.zero_grad()
        for rank in pieces:
            (critic(generator(batch(step, rank)[0])).pow(2).mean() / len(pieces)).backward()
        both = [*generator.parameters(), *critic.parameters()]
        norms.append(nn.utils.clip_grad_norm_(both, 1.0).item())
        first.step()
        first.zero_grad()
        second.zero_grad()
    return norms


def _two_models(strategies: tuple[str, str]) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:

    generator = sharded(strategies[0])
    critic = shard_blocks(build(_discriminator, seed=2), strategy=strategies[1])
    norms = _adversarial(generator, critic, [my_rank()])
    return norms, whole(generator), whole(critic)


@pytest.mark.parametrize("strategies", [("zero3", "zero3"), ("zero2", "replicate")])
def test_two_models_chained_in_one_graph_train_as_in_one_process(strategies: tuple[str, str]) -> None:
    generator, critic = build(), build(_discriminator, seed=2)
    norms = _adversarial(generator, critic, [0, 1])
    for found, first, second in ranks.run(_two_models, 2, strategies):
        assert found == pytest.approx(norms, rel=1e-5)
        assert_close(first, reference.whole_parameters(generator))
        assert_close(second, reference.whole_parameters(critic))


def _channels_last() -> dict[str, Any]:
    import fullshard as fs

    model = sharded(make=WithConv)
    model(batch(0, 0)[0])  # asserts inside
    with fs.full(model):
        inside = model.conv.weight.is_contiguous(memory_format=torch.channels_last)
        values = torch.equal(model.conv.weight, build(WithConv).conv.weight)
    return {"inside full": inside, "values": values}


def test_channels_last_weights_keep_their_memory_format() -> None:
    for found in ranks.run(_channels_last, 2):
        assert all(found.values()), found


def _inside_a_plain_model() -> tuple[float, tuple[str, str, str]]:
    import fullshard as fs

    outer = nn.Sequential(sharded(), build(lambda: nn.Linear(5, 5)))
    loss = F.cross_entropy(outer(batch(0, 0)[0]), batch(0, 0)[1])
    loss.backward()
    return loss.item(), refusal(lambda: fs.shard(outer))


def test_sharded_model_runs_inside_a_plain_one_which_cannot_be_sharded_again() -> None:
    plain = nn.Sequential(build(), build(lambda: nn.Linear(5, 5)))
    expected = F.cross_entropy(plain(batch(0, 0)[0]), batch(0, 0)[1]).item()
    for loss, (kind, message, _) in ranks.run(_inside_a_plain_model, 2):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert kind == "StateError"
        assert "'0'" in message
