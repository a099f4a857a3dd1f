"""The module stays a module: its surface, state dicts and checkpoints."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ranks
import reference
from cases import (
    ALL,
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
from engines import WIDTH, Net, build, shard_blocks

# --- the surface ---------------------------------------------------------------------------------------


def _surface() -> dict[str, Any]:
    import fullshard as fs

    model = build()
    names = [name for name, _ in model.named_parameters()]
    before = dict(model.named_parameters())
    returned = fs.shard(model)
    plain = build()
    for strategy in ALL[1:]:
        assert repr(sharded(strategy)) == repr(plain)
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
    model = sharded()
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
        "storage": refusal(value.untyped_storage),
    }
    kept = copy.deepcopy(state)
    cloned = {name: v.clone() for name, v in state.items()}
    found = {"shapes": shapes, "refused": refused, "repr": repr(value), "keys": list(state)}
    for label, snapshot in (("deepcopy", kept), ("clone", cloned)):
        train_step(model)
        found[f"changed before {label}"] = not same(whole(model), fresh_values())
        model.load_state_dict(snapshot)
        found[f"restored from {label}"] = same(whole(model), fresh_values())
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

    model = sharded(strategy)
    file = io.BytesIO()
    with fs.full(model):
        state = model.state_dict()
        types = {type(value) for value in state.values()}
        torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file)
    train_step(model)
    kept = same({n: state[n] for n in fresh_values()}, fresh_values()) if strategy != "replicate" else True
    plain = build(seed=9)
    plain.load_state_dict(loaded)
    return {
        "plain": types == {Tensor},
        "saved": same(reference.whole_parameters(plain), fresh_values()),
        "kept": kept,
    }


@pytest.mark.parametrize("strategy", ALL)
def test_state_dict_inside_full_is_the_plain_whole_one(strategy: str) -> None:
    for found in ranks.run(_whole_state, 2, strategy):
        assert all(found.values()), found


def _load(strategy: str) -> dict[str, Any]:
    import fullshard as fs

    other = fresh_values(seed=3)
    found: dict[str, Any] = {}
    model = sharded(strategy)
    found["keys"] = str(model.load_state_dict(other))
    found["whole"] = same(whole(model), other)
    model.load_state_dict({name: value.double() for name, value in fresh_values(4).items()})
    found["other dtype"] = same(whole(model), fresh_values(4))
    with fs.full(model):
        model.load_state_dict(other)
    found["inside full"] = same(whole(model), other)
    model.head.load_state_dict({"weight": torch.ones(5, WIDTH), "bias": torch.zeros(5)})
    found["submodule"] = same(
        whole(model), other | {"head.weight": torch.ones(5, WIDTH), "head.bias": torch.zeros(5)}
    )
    model.load_state_dict(other)
    found["loads its own"] = (model.load_state_dict(model.state_dict()), same(whole(model), other))[1]

    bad = {name: value * 2 for name, value in other.items()} | {"blocks.1.0.weight": torch.zeros(2, 2)}
    found["shape"] = refusal(lambda: model.load_state_dict(bad))
    found["shape, not strict"] = refusal(lambda: model.load_state_dict(bad, strict=False))
    found["type"] = refusal(lambda: model.load_state_dict(bad | {"blocks.1.0.weight": [1.0]}))
    found["assign"] = refusal(lambda: model.load_state_dict(other, assign=True))
    found["unchanged"] = same(whole(model), other)

    fewer = {name: value for name, value in other.items() if name != "head.bias"} | {"extra": torch.zeros(1)}
    found["not strict"] = str(model.load_state_dict(fewer, strict=False))
    try:
        model.load_state_dict(fewer)
    except RuntimeError as error:
        found["strict"] = str(error)
    train_step(model)
    found["trained"] = whole(model)
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
        assert found["assign"][0] == "NotSupported"
        assert "assign=True" in found["assign"][1]
        assert found["unchanged"], "a refused load changed something"
        assert found["not strict"] == str(plain.load_state_dict(fewer, strict=False))
        assert found["strict"] == str(info.value)
        assert_close(found["trained"], trained_in_one_process(range(1), build(seed=3)))


def _save_distributed(folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    model = sharded(make=WithConv)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


def _load_distributed(folder: str, strategy: str) -> bool:
    import torch.distributed.checkpoint as dcp

    model = shard_blocks(build(WithConv, seed=5), strategy=strategy)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    return same(whole(model), reference.whole_parameters(build(WithConv)))


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
        assert same(reference.whole_parameters(plain), reference.whole_parameters(build(WithConv)))
