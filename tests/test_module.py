"""The module stays a module: state dicts, casts, copies, whole values, several models in one process."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import cases
import engines
import ranks
import reference
from cases import ALL, Case, refusal
from engines import WIDTH, Net, batch, block, build, loss_of, my_rank


def _sharded(strategy: str = "zero3", make: Callable[[], nn.Module] = Net, **options: Any) -> nn.Module:
    import fullshard as fs

    return fs.shard(build(make), strategy=strategy, **options)


def _whole(model: nn.Module) -> dict[str, Tensor]:
    return engines.whole("fullshard", model)


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(reference.bitwise(a[name].detach(), b[name].detach()) for name in a)


def _plain(seed: int = 0) -> dict[str, Tensor]:
    return reference.whole_parameters(build(seed=seed))


def _step(model: nn.Module, step: int = 0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loss_of(model, batch(step, my_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()


def _expected_after(steps: range, model: nn.Module | None = None) -> dict[str, Tensor]:
    model = build() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in steps:
        for rank in range(2):
            (loss_of(model, batch(step, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return reference.whole_parameters(model)


def _assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        reference.assert_close(found[name], value, name)


# --- the surface ---------------------------------------------------------------------------------------


def _surface() -> dict[str, Any]:
    import fullshard as fs

    model = build()
    names = [name for name, _ in model.named_parameters()]
    before = dict(model.named_parameters())
    returned = fs.shard(model)
    plain = build()
    for strategy in ALL[1:]:
        assert repr(_sharded(strategy)) == repr(plain)
    return {
        "same module": returned is model,
        "type": type(model) is Net and isinstance(model, Net),
        "names": [name for name, _ in model.named_parameters()] == names,
        "modules": [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()],
        "objects": all(p is before[n] and type(p) is nn.Parameter for n, p in model.named_parameters()),
        "repr": repr(model) == repr(plain),
        "numel": sum(p.numel() for p in model.parameters()),
        "training": (model.eval().blocks[1].training, model.train().blocks[1].training),
        "keys": list(model.state_dict()) == list(plain.state_dict()),
    }


def test_sharded_module_looks_like_the_module_it_was() -> None:
    results = ranks.run(_surface, 2)
    total = sum(p.numel() for p in build().parameters())
    assert sum(result.pop("numel") for result in results) == total
    for result in results:
        assert result.pop("training") == (False, True)
        assert all(result.values()), result


# --- state dicts ---------------------------------------------------------------------------------------


def _state_values() -> dict[str, Any]:
    model = _sharded()
    state = model.state_dict()
    shapes = {name: (tuple(value.shape), value.dtype, value.numel()) for name, value in state.items()}
    value = state["head.weight"]
    refused = {
        "torch.save": refusal(lambda: torch.save(state, io.BytesIO())),
        "pickle": refusal(lambda: pickle.dumps(value)),
        "arithmetic": refusal(lambda: value + 1),
        "reduction": refusal(lambda: value.sum()),
        "indexing": refusal(lambda: value[0]),
        "comparison": refusal(lambda: torch.equal(value, value)),
        "numpy": refusal(value.numpy),
        "tolist": refusal(value.tolist),
        "data_ptr": refusal(value.data_ptr),
        "storage": refusal(value.untyped_storage),
    }
    kept = copy.deepcopy(state)
    cloned = {name: v.clone() for name, v in state.items()}
    found = {"shapes": shapes, "refused": refused, "repr": repr(value), "keys": list(state)}
    for label, snapshot in (("deepcopy", kept), ("clone", cloned)):
        _step(model)
        found[f"changed before {label}"] = not _same(_whole(model), _plain())
        model.load_state_dict(snapshot)
        found[f"restored from {label}"] = _same(_whole(model), _plain())
    return found


def test_state_dict_values_know_their_whole_shape_and_refuse_to_be_taken_for_it() -> None:
    plain = build().state_dict()
    for rank, found in enumerate(ranks.run(_state_values, 2)):
        assert found["keys"] == list(plain)
        for name, value in plain.items():
            assert found["shapes"][name] == (tuple(value.shape), value.dtype, value.numel())
        for what, (kind, message, remedy) in found["refused"].items():
            assert kind == "StateError", what
            assert message.startswith(f"rank {rank}:"), what
            assert ("blocks.0.0.weight" if what == "torch.save" else "head.weight") in message, what
            assert "fs.full" in remedy, what
            assert "torch.distributed.checkpoint" in remedy, what
        assert "head.weight" in found["repr"]
        assert "(5, 8)" in found["repr"]
        for label in ("deepcopy", "clone"):
            assert found[f"changed before {label}"]
            assert found[f"restored from {label}"]


def _whole_state(strategy: str) -> dict[str, Any]:
    import fullshard as fs

    model = _sharded(strategy)
    file = io.BytesIO()
    with fs.full(model):
        state = model.state_dict()
        types = {type(value) for value in state.values()}
        torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file)
    _step(model)
    kept = _same({n: state[n] for n in _plain()}, _plain()) if strategy != "replicate" else True
    plain = build(seed=9)
    plain.load_state_dict(loaded)
    return {
        "plain": types == {Tensor},
        "saved": _same(reference.whole_parameters(plain), _plain()),
        "kept": kept,
    }


@pytest.mark.parametrize("strategy", ALL)
def test_state_dict_inside_full_is_the_plain_whole_one(strategy: str) -> None:
    for found in ranks.run(_whole_state, 2, strategy):
        assert all(found.values()), found


def _load(strategy: str) -> dict[str, Any]:
    import fullshard as fs

    other = _plain(seed=3)
    found: dict[str, Any] = {}
    model = _sharded(strategy)
    found["keys"] = str(model.load_state_dict(other))
    found["whole"] = _same(_whole(model), other)
    model.load_state_dict({name: value.double() for name, value in _plain(4).items()})
    found["other dtype"] = _same(_whole(model), _plain(4))
    with fs.full(model):
        model.load_state_dict(other)
    found["inside full"] = _same(_whole(model), other)
    model.head.load_state_dict({"weight": torch.ones(5, WIDTH), "bias": torch.zeros(5)})
    found["submodule"] = _same(
        _whole(model), other | {"head.weight": torch.ones(5, WIDTH), "head.bias": torch.zeros(5)}
    )
    model.load_state_dict(other)
    found["loads its own"] = (model.load_state_dict(model.state_dict()), _same(_whole(model), other))[1]

    bad = {name: value * 2 for name, value in other.items()} | {"blocks.1.0.weight": torch.zeros(2, 2)}
    found["shape"] = refusal(lambda: model.load_state_dict(bad))
    found["shape, not strict"] = refusal(lambda: model.load_state_dict(bad, strict=False))
    found["type"] = refusal(lambda: model.load_state_dict(bad | {"blocks.1.0.weight": [1.0]}))
    found["assign"] = refusal(lambda: model.load_state_dict(other, assign=True))
    found["unchanged"] = _same(_whole(model), other)

    fewer = {name: value for name, value in other.items() if name != "head.bias"} | {"extra": torch.zeros(1)}
    found["not strict"] = str(model.load_state_dict(fewer, strict=False))
    try:
        model.load_state_dict(fewer)
    except RuntimeError as error:
        found["strict"] = str(error)
    _step(model)
    found["trained"] = _whole(model)
    return found


@pytest.mark.parametrize("strategy", ALL)
def test_load_state_dict_takes_whole_tensors_or_changes_nothing(strategy: str) -> None:
    plain = build(seed=3)
    fewer = {n: v for n, v in plain.state_dict().items() if n != "head.bias"} | {"extra": torch.zeros(1)}
    with pytest.raises(RuntimeError) as info:
        plain.load_state_dict(fewer)
    for found in ranks.run(_load, 2, strategy):
        assert found["keys"] == "<All keys matched successfully>"
        for what in ("whole", "other dtype", "inside full", "submodule", "loads its own"):
            assert found[what], what
        for what in ("shape", "shape, not strict", "type"):
            assert found[what][0] == "ModelError", what
            assert "blocks.1.0.weight" in found[what][1], what
        assert "(2, 2)" in found["shape"][1]
        assert "(13, 8)" in found["shape"][1]
        assert found["assign"][0] == "Unsupported"
        assert "assign=True" in found["assign"][1]
        assert found["unchanged"], "a refused load changed something"
        assert found["not strict"] == str(plain.load_state_dict(fewer, strict=False))
        assert found["strict"] == str(info.value)
        _assert_close(found["trained"], _expected_after(range(1), build(seed=3)))


def _save_distributed(folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    model = _sharded(make=WithConv)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


def _load_distributed(folder: str, strategy: str) -> bool:
    import torch.distributed.checkpoint as dcp

    import fullshard as fs

    model = fs.shard(build(WithConv, seed=5), strategy=strategy)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    return _same(_whole(model), reference.whole_parameters(build(WithConv)))


class WithConv(Net):
    """Uneven sizes, a buffer, and a weight that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        assert self.conv.weight.is_contiguous(memory_format=torch.channels_last)
        x = self.norm(x) * self.scale
        image = x[:, :6].reshape(-1, 3, 2, 1)
        return super().forward(x) + self.conv(image).mean((2, 3))


def test_checkpoint_of_two_ranks_is_read_by_one_by_three_and_by_a_plain_model() -> None:
    import torch.distributed.checkpoint as dcp

    with tempfile.TemporaryDirectory() as folder:
        ranks.run(_save_distributed, 2, folder)
        for count, strategy in ((1, "zero3"), (3, "zero3"), (3, "replicate")):
            assert ranks.run(_load_distributed, count, folder, strategy) == [True] * count
        plain = build(WithConv, seed=5)
        state = {"model": plain.state_dict()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that there is no process group
            dcp.load(state, checkpoint_id=folder, no_dist=True)
        plain.load_state_dict(state["model"])
        assert _same(reference.whole_parameters(plain), reference.whole_parameters(build(WithConv)))
        assert any(Path(folder).iterdir())


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
    model = _sharded(make=WithConv)
    before = _whole(model)
    for name, cast in CASTS.items():
        found["refused"][name] = refusal(lambda cast=cast: cast(model))
        assert _same(_whole(model), before), f"{name} changed a value"
        assert all(b.dtype != torch.float16 for b in model.buffers()), f"{name} changed a buffer"
    for name, call in HARMLESS.items():
        found["harmless"][name] = (call(model) is model, _same(_whole(model), before))
    model = _sharded()
    model.register_buffer("late", torch.ones(3))
    found["buffer"] = torch.equal(model.state_dict()["late"], torch.ones(3))
    _step(model)
    found["trained"] = _whole(model)
    return found


def test_cast_or_move_of_shards_is_refused_by_name_and_a_no_op_is_not() -> None:
    for found in ranks.run(_cast, 2):
        for name, (kind, message, remedy) in found["refused"].items():
            assert kind == "Unsupported", name
            assert f"{name.split()[0]}()" in message, name
            assert "fs.shard" in remedy, name
        for name, value in found["harmless"].items():
            assert value == (True, True), name
        assert found["buffer"]
        _assert_close(found["trained"], _expected_after(range(1)))


def _freeze(model: nn.Module, piece: cases.Piece, weight: float) -> float:
    """Frozen: the first block in the first two steps, the head afterwards, a bias from the third on."""
    model.count = getattr(model, "count", 0) + (1 if weight == 1 else 0.5)
    late = model.count > 2
    model.blocks[0].requires_grad_(late)
    model.head.requires_grad_(not late)
    model.blocks[2][0].bias.requires_grad_(model.count <= 3)
    return cases.plainly(model, piece, weight)


def _all_frozen_but(model: nn.Module) -> None:
    model.requires_grad_(False)


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

    model = _sharded(strategy)
    found: dict[str, Any] = {}
    try:
        model.apply(_initialise)
    except FullshardError as error:
        found["apply"] = type(error).__name__
    else:
        found["apply"] = float(_whole(model)["blocks.0.0.weight"].sum())
    try:
        torch.manual_seed(my_rank())
        model.head.reset_parameters()
    except FullshardError as error:
        found["reset"] = (type(error).__name__, "reset_parameters" in str(error))
    else:
        found["reset"] = _whole(model)["head.weight"]
    return found


@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_initialiser_run_after_shard_sees_whole_values_or_is_refused(strategy: str) -> None:
    first, second = ranks.run(_reinitialise, 2, strategy)
    assert first["apply"] in (13.0, pytest.approx(13.0), "AtRestError", "StateError", "Unsupported")
    assert first["apply"] == second["apply"]
    if isinstance(first["reset"], tuple):
        assert first["reset"] == ("AtRestError", True)
    else:
        assert reference.bitwise(first["reset"], second["reset"]), "ranks hold different values"


# --- functional_call, pickling, replaced parameters ----------------------------------------------------


def _call_functionally() -> dict[str, Any]:
    import fullshard as fs

    model = _sharded()
    x = batch(0, 0)[0]
    other = _plain(seed=3)
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
    _step(model)
    found["trained"] = _whole(model)
    return found


def test_functional_call_pickling_and_replaced_parameters_are_refused_where_they_cannot_work() -> None:
    for found in ranks.run(_call_functionally, 2):
        assert found["outside"][0] == "AtRestError"
        assert "functional_call" in found["outside"][2]
        assert reference.bitwise(found["inside"], build(seed=3)(batch(0, 0)[0]).detach())
        for what in ("pickle", "torch.save"):
            assert found[what][0] == "Unsupported"
            assert "fs.full" in found[what][2]
        for name in ("head.weight", "blocks.1.0.weight"):
            assert found[f"replaced {name}"][0] == "AtRestError"
            assert name in found[f"replaced {name}"][1]
        _assert_close(found["trained"], _expected_after(range(1)))


# --- whole values --------------------------------------------------------------------------------------


def _fill(parameter: Tensor, value: float) -> None:
    with torch.no_grad():
        parameter.fill_(value)


def _edit_whole(strategy: str) -> dict[str, Any]:
    import fullshard as fs

    model = _sharded(strategy)
    found: dict[str, Any] = {}
    parameter = model.head.weight
    with fs.full(model) as inside:
        found["same module"] = inside is model
        found["read"] = _same(reference.whole_parameters(model), _plain())
        found["same object"] = model.head.weight is parameter
        _fill(model.head.weight, 2.0)
        model.head.bias.data = torch.full((5,), 3.0)
        model.blocks[0][0].bias.data.mul_(0).add_(4.0)
    with fs.full(model, writeback=False):
        _fill(model.blocks[1][0].bias, 5.0)
    with fs.full(model.blocks[2]):
        _fill(model.blocks[2][0].bias, 6.0)
        with fs.full(model):
            found["nested"] = _same(
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
    _step(model)
    found["trained"] = _whole(model)
    return found


def _edited() -> nn.Module:
    plain = build()
    _fill(plain.head.weight, 2.0)
    _fill(plain.head.bias, 3.0)
    _fill(plain.blocks[0][0].bias, 4.0)
    _fill(plain.blocks[2][0].bias, 6.0)
    _fill(plain.blocks[2][2].bias, 7.0)
    return plain


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_edits_inside_full_count_and_without_writeback_do_not(strategy: str) -> None:
    for found in ranks.run(_edit_whole, 2, strategy):
        after, trained = found.pop("after"), found.pop("trained")
        assert all(found.values()), found
        expected = reference.whole_parameters(_edited())
        for name, value in expected.items():
            assert reference.bitwise(after[name], value), name
        _assert_close(trained, _expected_after(range(1), _edited()))


def _edit_on_rank_zero() -> dict[str, Any]:
    import fullshard as fs

    found: dict[str, Any] = {}
    for strategy in ("zero3", "replicate"):
        model = _sharded(strategy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with fs.full(model):
                _fill(model.blocks[1][0].bias, 1.0 + my_rank())
        found[strategy] = (_whole(model)["blocks.1.0.bias"], [str(w.message) for w in caught])
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
    model = _sharded(make=OpensItself)
    found["in forward"] = refusal(lambda: model(batch(0, 0)[0]))
    found["not sharded"] = refusal(lambda: fs.full(build()).__enter__())
    model = _sharded()
    with fs.full(model):
        x, y = batch(0, my_rank())
        loss = F.cross_entropy(model(x), y)
        found["forward"] = loss.item()
        found["backward"] = refusal(loss.backward)
    _step(model)
    found["trained"] = _whole(model)
    return found


def test_full_inside_forward_and_backward_inside_full_are_refused() -> None:
    for rank, found in enumerate(ranks.run(_misuse_full, 2)):
        for what in ("in forward", "not sharded", "backward"):
            assert found[what][0] == "StateError", what
            assert found[what][2], f"{what} has no remedy"
        assert found["forward"] == pytest.approx(loss_of(build(), batch(0, rank)).item(), rel=1e-6)
        _assert_close(found["trained"], _expected_after(range(1)))


# --- copies and several models -------------------------------------------------------------------------


def _copies(strategy: str) -> dict[str, Any]:
    model = _sharded(strategy)
    _step(model)
    twin = copy.deepcopy(model)
    found = {"equal": _same(_whole(twin), _whole(model))}
    found["own memory"] = all(a is not b for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    before = _whole(model)
    _step(twin, 1)
    found["apart"] = _same(_whole(model), before)
    copied = _whole(copy.deepcopy(twin))
    found["copy of a copy"] = _same(copied, _whole(twin))
    _step(model, 1)
    found["both train alike"] = _same(_whole(model), _whole(twin))
    return found


@pytest.mark.parametrize("strategy", ALL)
def test_deepcopy_is_an_independent_model_that_trains_alike(strategy: str) -> None:
    for found in ranks.run(_copies, 2, strategy):
        assert all(found.values()), found


def _averaged(model: nn.Module, average: nn.Module, pieces: list[int]) -> list[float]:
    """The usual exponential moving average, written by hand, evaluated every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for step in range(3):
        for rank in pieces:
            (loss_of(model, batch(step, rank)) / len(pieces)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for averaged, p in zip(average.parameters(), model.parameters(), strict=True):
                averaged.mul_(0.7).add_(p, alpha=0.3)
            losses.append(loss_of(average, batch(9, 0)).item())
    return losses


def _moving_average(strategy: str) -> tuple[list[float], dict[str, Tensor]]:
    model = _sharded(strategy)
    average = copy.deepcopy(model).requires_grad_(False)
    losses = _averaged(model, average, [my_rank()])
    return losses, _whole(average)


@pytest.mark.parametrize("strategy", ALL)
def test_moving_average_in_a_deepcopy_is_that_of_one_process(strategy: str) -> None:
    model = build()
    average = copy.deepcopy(model)
    losses = _averaged(model, average, [0, 1])
    for found, parameters in ranks.run(_moving_average, 2, strategy):
        assert found == pytest.approx(losses, rel=1e-5)
        _assert_close(parameters, reference.whole_parameters(average))


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
    import fullshard as fs

    generator = _sharded(strategies[0])
    critic = fs.shard(build(_discriminator, seed=2), strategy=strategies[1])
    norms = _adversarial(generator, critic, [my_rank()])
    return norms, _whole(generator), _whole(critic)


@pytest.mark.parametrize("strategies", [("zero3", "zero3"), ("zero2", "replicate")])
def test_two_models_chained_in_one_graph_train_as_in_one_process(strategies: tuple[str, str]) -> None:
    generator, critic = build(), build(_discriminator, seed=2)
    norms = _adversarial(generator, critic, [0, 1])
    for found, first, second in ranks.run(_two_models, 2, strategies):
        assert found == pytest.approx(norms, rel=1e-5)
        _assert_close(first, reference.whole_parameters(generator))
        _assert_close(second, reference.whole_parameters(critic))


def _channels_last() -> dict[str, Any]:
    import fullshard as fs

    model = _sharded(make=WithConv)
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

    outer = nn.Sequential(_sharded(), build(lambda: nn.Linear(5, 5)))
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
