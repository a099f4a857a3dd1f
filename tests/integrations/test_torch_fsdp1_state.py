"""State dicts of torch's FSDP1 signature: three types, any number of ranks, models and optimizers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from test_torch_fsdp1 import (
    assert_state,
    assert_values,
    by_hand,
    by_policy,
    in_one_process,
    ours,
    plainly,
    train,
)
from torch import Tensor, nn

import ranks
import reference
from engines import Net, batch, build, loss_of, my_rank


class WithBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, 7))
        self.scale = nn.Parameter(torch.tensor(1.5))  # without dimensions
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        image = x[:, :6].reshape(-1, 3, 2, 1)
        return super().forward(x) * self.scale + self.conv(image).mean((2, 3))


def _step(model: Any, optimizer: torch.optim.Optimizer, pieces: list[int]) -> None:
    for rank in pieces:
        (loss_of(model, batch(0, rank)) / len(pieces)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _trained(way: Any = by_policy, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = way(ours(), build(WithBuffer), **options)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
    _step(model, optimizer, [my_rank() % 2])
    return model, optimizer


def _expected() -> tuple[dict[str, Tensor], dict[str, Any], nn.Module]:
    model = build(WithBuffer)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
    _step(model, optimizer, [0, 1])
    state = {name: optimizer.state[p] for name, p in model.named_parameters()}
    return {k: v.clone() for k, v in model.state_dict().items()}, state, model


def _written(folder: str) -> None:
    """Every form of a state dict, written as FSDP1's users do."""
    from torch.distributed import checkpoint as dcp

    from cases import refusal
    from fullshard.state.state_dict import StateShard
    from fullshard.torch_fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP

    model, optimizer = _trained()
    before = FSDP.get_state_dict_type(model)
    configs = (
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(rank0_only=True),
    )
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        state, optimizer_state = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        inner = model.blocks[1].state_dict()  # of an inner wrapper, with names of its own
    assert FSDP.get_state_dict_type(model) == before
    assert bool(state) == bool(optimizer_state) == bool(inner) == (my_rank() == 0)
    if my_rank() == 0:
        assert list(inner) == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert all(type(v) is Tensor and v.device.type == "cpu" for v in state.values())
        torch.save({"model": state, "optimizer": optimizer_state}, f"{folder}/full.pt")
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        sharded = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
        assert isinstance(sharded["model"]["head.weight"], StateShard)
        assert sharded["model"]["head.weight"].shape == (5, 8)
        dcp.save(sharded, checkpoint_id=f"{folder}/sharded")
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        torch.save(model.state_dict(), f"{folder}/local{my_rank()}.pt")
        assert refusal(lambda: FSDP.optim_state_dict(model, optimizer))[0] == "NotSupported"


def _read(folder: str, way: str, strategy: str) -> dict[str, Any]:
    from torch.distributed import checkpoint as dcp

    from fullshard.torch_fsdp import FullOptimStateDictConfig, ShardingStrategy, StateDictType
    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP

    found: dict[str, Any] = {}
    ways = {"policy": by_policy, "hand": by_hand, "one": plainly}
    for kind in ("all ranks", "first rank", "sharded"):
        inside = build(WithBuffer, seed=5)
        model = ways[way](ours(), inside, sharding_strategy=ShardingStrategy[strategy])
        optimizer = torch.optim.NAdam(model.parameters(), lr=7.0)
        if kind == "sharded":
            _step(model, optimizer, [my_rank() % 2])  # DCP loads into state that is there
            FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
            saved = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
            dcp.load(saved, checkpoint_id=f"{folder}/sharded")
        else:
            saved = torch.load(f"{folder}/full.pt", weights_only=True)
            config = FullOptimStateDictConfig(rank0_only=kind == "first rank")
            FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config)
        result = model.load_state_dict(saved["model"])
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        mine = saved["optimizer"] if kind != "first rank" or my_rank() == 0 else None
        loaded = FSDP.optim_state_dict_to_load(model, optimizer, mine)
        optimizer.load_state_dict(loaded)
        FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
        found[kind] = (
            model.state_dict(),
            FSDP.optim_state_dict(model, optimizer),
            optimizer.param_groups[0]["lr"],
        )
        _step(model, optimizer, [my_rank() % 2])  # goes on
    return found


def test_state_saved_on_two_ranks_loads_on_any_number_with_any_strategy(tmp_path: Path) -> None:
    state, optimizer_state, _ = _expected()
    ranks.run(_written, 2, str(tmp_path), init=True, timeout_s=120)
    saved = torch.load(tmp_path / "full.pt", weights_only=True)
    assert_values(saved["model"], state, "saved")
    assert_state(saved["optimizer"], optimizer_state, "saved")
    cases = ((3, "hand", "FULL_SHARD"), (1, "policy", "SHARD_GRAD_OP"), (2, "one", "NO_SHARD"))
    for num_ranks, way, strategy in cases:
        for found in ranks.run(_read, num_ranks, str(tmp_path), way, strategy, init=True, timeout_s=120):
            for kind, (values, held, lr) in found.items():
                assert_values(values, state, f"{kind} on {num_ranks}")
                assert_state(held, optimizer_state, f"{kind} on {num_ranks}")
                assert lr == 1e-2


def _local(folder: str) -> None:
    from cases import refusal
    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP
    from fullshard.torch_fsdp import StateDictType

    model = by_policy(ours(), build(WithBuffer, seed=5))
    mine, others = (torch.load(f"{folder}/local{r}.pt") for r in (my_rank(), 1 - my_rank()))
    assert refusal(lambda: model.load_state_dict(mine))[0] == "StateError", "not under another type"
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        kind, message, remedy = refusal(lambda: model.load_state_dict(others))
        assert (kind, f"rank {1 - my_rank()} of 2" in message) == ("StateError", True), message
        assert "FULL_STATE_DICT" in remedy
        model.load_state_dict(mine)
        again = model.state_dict()
        assert all(again[k].dim() == 1 and torch.equal(again[k], v) for k, v in mine.items() if k != "table")
    whole = torch.load(f"{folder}/full.pt")["model"]
    assert_values(model.state_dict(), whole, "local")


def test_local_state_goes_back_to_the_rank_it_came_from_alone(tmp_path: Path) -> None:
    ranks.run(_written, 2, str(tmp_path), init=True, timeout_s=120)
    ranks.run(_local, 2, str(tmp_path), init=True, timeout_s=120)


def _wrong_states() -> None:
    from cases import refusal
    from fullshard.errors import FullshardError
    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP

    model, optimizer = _trained(by_hand)
    good = model.state_dict()
    bad = {**{k: v + 1 for k, v in good.items()}, "head.weight": torch.zeros(3, 3)}
    assert "head.weight" in refusal(lambda: model.load_state_dict(bad))[1]
    assert_values(model.state_dict(), good, "a bad file changes nothing")
    try:
        model.load_state_dict(
            {k: v for k, v in good.items() if k != "blocks.1.0.bias"} | {"strange": torch.ones(1)}
        )
    except RuntimeError as error:
        assert not isinstance(error, FullshardError)
        assert '"blocks.1.0.bias"' in str(error)
        assert '"strange"' in str(error)
        assert "_fsdp_wrapped_module" not in str(error)
    else:
        raise AssertionError("a missing key was not noticed")
    said = model.load_state_dict({k: v for k, v in good.items() if k != "blocks.1.0.bias"}, strict=False)
    assert said.missing_keys == ["blocks.1.0.bias"]
    whole = FSDP.optim_state_dict(model, optimizer)
    wrong = {**whole, "state": {"nobody": {}}}
    assert "'nobody'" in refusal(lambda: FSDP.optim_state_dict_to_load(model, optimizer, wrong))[1]
    whole["state"]["head.bias"]["exp_avg"] = torch.zeros(3)
    assert "'head.bias'" in refusal(lambda: FSDP.optim_state_dict_to_load(model, optimizer, whole))[1]
    assert refusal(lambda: FSDP.optim_state_dict(build(), optimizer))[0] == "StateError"
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)  # plain and whole: anybody can read it


def test_state_that_does_not_fit_is_refused_by_name_and_changes_nothing() -> None:
    ranks.run(_wrong_states, 2, init=True, timeout_s=120)


def _older_names() -> dict[str, Any]:
    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP
    from fullshard.torch_fsdp import OptimStateKeyType

    model, optimizer = _trained()
    full = FSDP.full_optim_state_dict(model, optimizer)
    assert bool(full) == (my_rank() == 0), "the first rank alone, by default"
    everywhere = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    sharded = FSDP.sharded_optim_state_dict(model, optimizer)
    local = {k: dict(v) for k, v in optimizer.state_dict()["state"].items()}
    parts = {
        "shard_full": FSDP.shard_full_optim_state_dict(everywhere, model, optim=optimizer),
        "by input": FSDP.shard_full_optim_state_dict(everywhere, model, optim_input=list(model.parameters())),
        "by default": FSDP.shard_full_optim_state_dict(everywhere, model),
        "scatter": FSDP.scatter_full_optim_state_dict(full or None, model, optim=optimizer),
        "flatten": FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer),
    }
    for what, part in parts.items():
        assert sorted(part["state"]) == sorted(local), what
        for p, held in zip(model.parameters(), part["state"].values(), strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(held[key], optimizer.state[p][key]), f"{what}: {key}"
            assert held["mu_product"].dim() == 0, what
        optimizer.load_state_dict(part)
    named = FSDP.optim_state_dict_to_load(model, optimizer, everywhere, is_named_optimizer=True)
    assert list(named["state"]) == list(everywhere["state"])
    FSDP.optim_state_dict_to_load(model, optimizer, everywhere, load_directly=True)
    numbers = FSDP.rekey_optim_state_dict(everywhere, OptimStateKeyType.PARAM_ID, build(WithBuffer))
    back = FSDP.rekey_optim_state_dict(numbers, OptimStateKeyType.PARAM_NAME, build(WithBuffer))
    assert list(back["state"]) == list(everywhere["state"])
    return {"whole": everywhere, "numbers": numbers}


def test_older_names_for_optimizer_state_do_the_same() -> None:
    _, expected, plain = _expected()
    for found in ranks.run(_older_names, 2, init=True, timeout_s=120):
        assert_state(found["whole"], expected, "full_optim_state_dict")
        optimizer = torch.optim.NAdam(plain.parameters(), lr=1e-2)
        optimizer.load_state_dict(found["numbers"])  # of an unsharded model, in one process
        for name, p in plain.named_parameters():
            reference.assert_close(optimizer.state[p]["exp_avg"], expected[name]["exp_avg"], name)


def _saved_by_us(folder: str) -> dict[str, Any]:
    import fullshard as fs

    model, optimizer = _trained()
    fs.save(f"{folder}/step", model, optimizer)
    other = plainly(ours(), build(WithBuffer, seed=5))
    second = torch.optim.NAdam(other.parameters(), lr=1e-2)
    list(other.parameters())
    fs.load(f"{folder}/step", other, second)
    found = train(ours(), by_policy(ours(), build()))  # and it trains on, beside
    assert_values(found["model"], in_one_process()["model"], "trained")
    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP

    return {"model": other.state_dict(), "optimizer": FSDP.optim_state_dict(other, second)}


def test_fs_save_and_load_take_a_wrapped_model_under_plain_names(tmp_path: Path) -> None:
    state, optimizer_state, _ = _expected()
    for found in ranks.run(_saved_by_us, 2, str(tmp_path), init=True, timeout_s=120):
        assert_values(found["model"], state, "loaded")
        assert_state(found["optimizer"], optimizer_state, "loaded")


def _counts() -> list[Any]:
    import fullshard as fs

    model = fs.shard(build(WithBuffer))
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
    _step(model, optimizer, [my_rank()])
    optimizer.load_state_dict(optimizer.state_dict())
    _step(model, optimizer, [my_rank()])
    held = optimizer.state[model.scale]
    return [held["step"].item(), held["mu_product"].dim(), held["exp_avg"].numel()]


def test_numbers_that_an_optimizer_keeps_for_a_parameter_without_dimensions_survive_a_load() -> None:
    first, second = ranks.run(_counts, 2, timeout_s=120)
    assert first[:2] == second[:2] == [2.0, 0]
    assert first[2] + second[2] == 1, "one rank has its element"


def _parts_alone() -> list[dict[str, Any]]:
    """Blocks are wrapped, the model around them is not: each is an engine, the rest is not sharded."""
    from fullshard.torch_fsdp import FullOptimStateDictConfig, StateDictType
    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP

    def wrapped(*blocks: int) -> tuple[Any, torch.optim.Optimizer]:
        model = build(WithBuffer)
        for i in blocks:
            model.blocks[i] = FSDP(model.blocks[i])
        return model, torch.optim.NAdam(model.parameters(), lr=1e-2)

    model, optimizer = wrapped(0, 2)
    _step(model, optimizer, [0, 1])  # the same batches on both ranks
    taken = FSDP.optim_state_dict(model, optimizer)
    own = optimizer.state_dict()
    bare = FSDP.optim_state_dict(model, optimizer, {"state": own["state"]})
    assert "param_groups" not in bare
    names = list(_expected()[1])
    sorted_groups = [own["param_groups"][0] | {"params": sorted(names)}]
    by_names = {"state": {names[i]: held for i, held in own["state"].items()}, "param_groups": sorted_groups}
    found = [taken, bare | {"param_groups": sorted_groups}, FSDP.optim_state_dict(model, optimizer, by_names)]
    for blocks, first_only in (((1,), False), ((0, 1), True)):
        other, second = wrapped(*blocks)
        config = FullOptimStateDictConfig(rank0_only=first_only)
        FSDP.set_state_dict_type(other, StateDictType.FULL_STATE_DICT, None, config)
        given = taken if my_rank() == 0 or not first_only else None
        FSDP.optim_state_dict_to_load(other, second, given, load_directly=True)
        FSDP.set_state_dict_type(other, StateDictType.FULL_STATE_DICT)
        found.append(FSDP.optim_state_dict(other, second))
    return found


def test_optimizer_state_of_wrapped_parts_in_a_plain_model_is_whole_under_the_names_of_the_model() -> None:
    _, expected, _ = _expected()
    for found in ranks.run(_parts_alone, 2, init=True, timeout_s=120):
        for number, state in enumerate(found):
            assert_state(state, expected, f"way {number}")


# --- torch.distributed.checkpoint.state_dict --------------------------------------------------------------


class Named(WithBuffer):
    """One of its children has the name of an attribute of wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(super().forward(x))
        return out


def _parts(doors: Any, model: Any, **options: Any) -> Any:
    """Blocks are wrapped, the model around them is not."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = plainly(doors, block, **options)
    return model


def _by_functions_of_torch(folder: str) -> dict[str, Any]:
    """A checkpoint is written, read into another model with a new optimizer, and trained on."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as stock

    from fullshard.state.state_dict import StateShard
    from fullshard.torch_fsdp import CPUOffload

    found: dict[str, Any] = {}
    full = stock.StateDictOptions(full_state_dict=True)
    on_first = stock.StateDictOptions(full_state_dict=True, cpu_offload=True)
    from_first = stock.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    flat = stock.StateDictOptions(flatten_optimizer_state_dict=True)
    for way, offload in (
        (by_policy, False),
        (by_hand, True),
        (plainly, True),
        (_parts, True),
        (_parts, False),
    ):
        pieces = [0, 1] if way is _parts else [my_rank()]  # what is not wrapped has no other gradients
        made = []
        for seed in (0, 5, 6, 7):
            model = way(ours(), build(Named, seed=seed), cpu_offload=CPUOffload(offload))
            made.append((model, torch.optim.NAdam(model.parameters(), lr=1e-2)))
        _step(*made[0], pieces)
        taken = stock.get_state_dict(*made[0])
        assert isinstance(taken[0]["blocks.0.0.weight"], StateShard)  # no rank holds the unsharded model
        first_ranks = stock.get_state_dict(*made[0], options=on_first)
        assert bool(first_ranks[0]) == (my_rank() == 0)
        for (model, optimizer), options in zip(made[1:], (None, flat, from_first), strict=True):
            if options is from_first:
                values, state = first_ranks
            else:
                name = f"{folder}/{way.__name__} {offload} {options is None}"
                written = taken if options is None else stock.get_state_dict(*made[0], options=options)
                dcp.save({"model": written[0], "optimizer": written[1]}, checkpoint_id=name)
                read = dict(
                    zip(
                        ("model", "optimizer"),
                        stock.get_state_dict(model, optimizer, options=options),
                        strict=True,
                    )
                )
                dcp.load(read, checkpoint_id=name)
                values, state = read["model"], read["optimizer"]
            stock.set_model_state_dict(model, values, options=options)
            stock.set_optimizer_state_dict(model, optimizer, state, options=options)
            _step(model, optimizer, pieces)
            case = f"{way.__name__} {offload} {options}"
            found[case] = stock.get_state_dict(model, optimizer, options=full)
    return found


def test_state_functions_of_torch_write_and_read_wrapped_models_under_plain_names(tmp_path: Path) -> None:
    model = build(Named)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
    for _ in range(2):
        _step(model, optimizer, [0, 1])
    expected = {name: optimizer.state[p] for name, p in model.named_parameters()}
    for found in ranks.run(_by_functions_of_torch, 2, str(tmp_path), init=True, timeout_s=180):
        for case, (values, state) in found.items():
            assert_values(values, model.state_dict(), case)
            assert_state(state, expected, case)


# --- optimizers that step on entire tensors ---------------------------------------------------------------


def _owned_optimizers() -> list[tuple[str, list[str], list[str]]]:
    """By optimizer and state dict type: values that are not those of one process, and parameters that differ
    after one more step of a model that has loaded them."""
    import optimizer_kinds as kinds

    wrapper, types = ours()[0].FullyShardedDataParallel, ours()[0].StateDictType
    makes: list[Any] = [
        lambda model: torch.optim.Adafactor(model.parameters(), lr=0.05),
        lambda model: kinds.Shampoo(model.parameters(), lr=0.01),
        lambda model: torch.optim.Muon([p for n, p in model.named_parameters() if n.endswith("0.weight")]),
    ]
    found = []
    for make in makes:
        plain = build(WithBuffer)
        expected = make(plain)
        _step(plain, expected, [0, 1])
        for full in (True, False):
            kind = types.FULL_STATE_DICT if full else types.SHARDED_STATE_DICT
            models = [by_policy(ours(), build(WithBuffer)) for _ in range(2)]
            optimizers = [make(model) for model in models]
            _step(models[0], optimizers[0], [my_rank()])
            with wrapper.state_dict_type(models[0], kind), wrapper.state_dict_type(models[1], kind):
                taken = wrapper.optim_state_dict(models[0], optimizers[0])
                models[1].load_state_dict(models[0].state_dict())
                loaded = wrapper.optim_state_dict_to_load(models[1], optimizers[1], taken)
            optimizers[1].load_state_dict(loaded)
            wrong = []
            for name, p in plain.named_parameters():
                for key, value in expected.state.get(p, {}).items():
                    mine = taken["state"][name][key]
                    mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
                    if isinstance(value, Tensor) and not torch.allclose(mine, value, rtol=1e-3, atol=1e-5):
                        wrong.append(f"{name}.{key}")
            for model, optimizer in zip(models, optimizers, strict=True):
                _step(model, optimizer, [my_rank()])
            with wrapper.summon_full_params(models[0]), wrapper.summon_full_params(models[1]):
                pairs = zip(models[0].named_parameters(), models[1].parameters(), strict=True)
                differing = [name for (name, a), b in pairs if not torch.equal(a, b)]
            found.append((f"{type(optimizers[0]).__name__} {kind}", wrong, differing))
    return found


def test_state_of_entire_tensors_is_taken_and_loaded_by_names() -> None:
    for found in ranks.run(_owned_optimizers, 2):
        for name, wrong, differing in found:
            assert (wrong, differing) == ([], []), name
