"""Options of torch's FSDP1 signature: each does what it says, or is refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_torch_fsdp1 import (
    assert_state,
    assert_values,
    by_hand,
    by_policy,
    in_one_process,
    ours,
    plainly,
    real,
    train,
)
from torch import Tensor, nn

import ranks
import reference
from engines import Net, batch, build, loss_of, my_rank


def _refused() -> dict[str, tuple[str, str, str]]:
    from cases import refusal
    from fullshard import torch_fsdp as door
    from fullshard.torch_fsdp.wrap import CustomPolicy

    FSDP, mixed = door.FullyShardedDataParallel, door.MixedPrecision

    def used(**options: Any) -> Any:
        return list(FSDP(build(), **options).parameters())

    def nested(**options: Any) -> Any:
        model = build()
        model.head = FSDP(model.head, **options)
        return list(FSDP(model).parameters())

    def mixed_with(**options: Any) -> Any:
        return FSDP(build(), mixed_precision=mixed(**options))

    def summoned(**options: Any) -> Any:
        return FSDP.summon_full_params(model, **options).__enter__()

    model = FSDP(build())
    turned = torch.distributed.device_mesh.DeviceMesh("cpu", torch.tensor([1, 0]))
    sharded = door.StateDictType.SHARDED_STATE_DICT
    tries: dict[str, Callable[[], Any]] = {
        "cpu_offload": lambda: FSDP(build(), cpu_offload="host"),
        "keep_low_precision_grads": lambda: mixed_with(keep_low_precision_grads=True),
        "_module_classes_to_ignore": lambda: FSDP(
            build(),
            auto_wrap_policy=CustomPolicy(lambda m: False),
            mixed_precision=mixed(param_dtype=torch.bfloat16, _module_classes_to_ignore=(nn.Linear,)),
        ),
        "register_comm_hook": lambda: FSDP(build()).register_comm_hook(None, print),
        "_use_dtensor": lambda: FSDP.set_state_dict_type(
            FSDP(build()), sharded, door.ShardedStateDictConfig(_use_dtensor=True)
        ),
        "does not go with": lambda: FSDP.set_state_dict_type(model, sharded, door.FullStateDictConfig()),
        "NO_SHARD": lambda: nested(sharding_strategy=door.ShardingStrategy.NO_SHARD),
        "other ranks": lambda: nested(device_mesh=turned),
        "rank0_only": lambda: summoned(rank0_only=True),
        "with_grads": lambda: summoned(offload_to_cpu=True, with_grads=True),
        "sharding_strategy": lambda: FSDP(build(), sharding_strategy="full"),
        "backward_prefetch": lambda: FSDP(build(), backward_prefetch=True),
        "auto_wrap_policy": lambda: FSDP(build(), auto_wrap_policy=3),
        "already": lambda: FSDP(FSDP(build()), auto_wrap_policy=CustomPolicy(lambda m: False)),
        "CustomPolicy": lambda: FSDP(build(), auto_wrap_policy=CustomPolicy(lambda m: "yes")),
        "both": lambda: FSDP(build(), ignored_modules=[], ignored_states=[]),
        "ignored_modules": lambda: FSDP(build(), ignored_modules=[torch.ones(1)]),
        "mixed_precision": lambda: FSDP(build(), mixed_precision=torch.bfloat16),
        "int8 compute": lambda: mixed_with(param_dtype=torch.int8),
        "two axes": lambda: FSDP(
            build(), device_mesh=torch.distributed.init_device_mesh("cpu", (2,)),
            sharding_strategy=door.ShardingStrategy.HYBRID_SHARD,
        ),
    }  # fmt: skip
    assert used(), "and without them it works"
    return {what: refusal(call) for what, call in tries.items()}


def test_what_cannot_be_honoured_is_refused_by_name_with_a_remedy() -> None:
    supported = {"keep_low_precision_grads", "_module_classes_to_ignore", "_use_dtensor",
                 "register_comm_hook", "NO_SHARD", "other ranks", "rank0_only", "with_grads"}  # fmt: skip
    for found in ranks.run(_refused, 2, init=True, timeout_s=120):
        for what, (kind, message, remedy) in found.items():
            assert (what in message) or what == "int8 compute" or what in remedy, (what, message, remedy)
            assert kind == ("NotSupported" if what in supported else "OptionError"), (what, kind)
            assert remedy, what


def _torchs_words() -> None:
    """Enums, records and policies that a script still imports from torch."""
    theirs = real()[0]
    from fullshard.torch_fsdp import (
        BackwardPrefetch,
        FullyShardedDataParallel,
        ShardingStrategy,
        StateDictType,
    )

    model = by_policy(
        ours(),
        build(),
        sharding_strategy=theirs.ShardingStrategy.SHARD_GRAD_OP,
        backward_prefetch=theirs.BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=theirs.MixedPrecision(param_dtype=torch.float32),
        cpu_offload=theirs.CPUOffload(offload_params=False),
    )
    assert model.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert model.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    with FullyShardedDataParallel.state_dict_type(
        model, theirs.StateDictType.FULL_STATE_DICT, theirs.FullStateDictConfig(rank0_only=True)
    ):
        assert (
            FullyShardedDataParallel.get_state_dict_type(model).state_dict_type
            is StateDictType.FULL_STATE_DICT
        )
        assert bool(model.state_dict()) == (my_rank() == 0)
    found = train(ours(), model)
    assert_values(found["model"], in_one_process()["model"], "torch's words")
    quiet = by_policy(ours(), build(), backward_prefetch=theirs.BackwardPrefetch.BACKWARD_POST)
    list(quiet.parameters())
    assert not quiet.__dict__["_fullshard"].options.prefetch, "POST: freed before the next gets memory"


def test_enums_and_records_of_torch_itself_are_taken() -> None:
    ranks.run(_torchs_words, 2, init=True, timeout_s=120)


# --- over which ranks ------------------------------------------------------------------------------------


def _ranks_of_four() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP
    from fullshard.torch_fsdp import ShardingStrategy

    expected = in_one_process(num_ranks=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    groups = mesh.get_group("inner"), mesh.get_group("outer")
    tries: list[dict[str, Any]] = [
        {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD},
        {"process_group": groups, "sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2},
        {"process_group": dist.group.WORLD},
        {"device_mesh": init_device_mesh("cpu", (4,))},
    ]
    for options in tries:
        model = by_hand(ours(), build(), **options)
        found = train(ours(), model)
        assert_values(found["model"], expected["model"], str(options))
        assert_state(found["optimizer"], expected["optimizer"], str(options))
        comm = model.__dict__["_fullshard"].comm
        assert (comm.ranks, comm.replicas) == ((2, 2) if "sharding_strategy" in options else (4, 1))
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)

    half = my_rank() // 2
    pair = by_policy(ours(), build(), process_group=groups[0])  # each pair of ranks a model of its own
    loss_of(pair, batch(0, my_rank())).backward()
    alone = build()
    for rank in (2 * half, 2 * half + 1):
        (loss_of(alone, batch(0, rank)) / 2).backward()
    with FSDP.summon_full_params(pair, with_grads=True):
        for (name, p), q in zip(pair.named_parameters(), alone.parameters(), strict=True):
            reference.assert_close(p.grad, q.grad, name)


def test_groups_and_meshes_name_the_ranks_to_shard_and_to_replicate_over() -> None:
    ranks.run(_ranks_of_four, 4, init=True, timeout_s=180)


def _beside_other_groups() -> None:
    import torch.distributed as dist

    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP

    first = dist.new_group([0])  # known to one rank alone
    assert_values(FSDP(build(seed=my_rank())).state_dict(), dict(build(seed=0).state_dict()), "all ranks")
    if my_rank() == 0:
        assert_values(FSDP(build(), process_group=first).state_dict(), dict(build().state_dict()), "alone")
    found = train(ours(), by_policy(ours(), build()))
    assert_values(found["model"], in_one_process()["model"], "trained")


def test_ranks_find_each_other_when_a_script_has_groups_of_some_of_them() -> None:
    ranks.run(_beside_other_groups, 2, init=True, timeout_s=90)


def _mixed_strategies() -> None:
    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP
    from fullshard.torch_fsdp import ShardingStrategy
    from fullshard.torch_fsdp.wrap import CustomPolicy

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        if isinstance(module, nn.Linear) and module.out_features == 5:
            return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
        return isinstance(module, nn.Sequential)

    model = FSDP(build(), auto_wrap_policy=CustomPolicy(choose))
    found = train(ours(), model)
    assert_values(found["model"], in_one_process()["model"], "mixed strategies")
    runtime = model.__dict__["_fullshard"]
    assert [unit.policy.stays_full for unit in runtime.units] == [None, None, None, None, True]  # the head's
    assert runtime.options.strategy == "zero3"


def test_units_that_stay_full_may_lie_beside_others() -> None:
    ranks.run(_mixed_strategies, 2, init=True, timeout_s=120)


# --- mixed precision -------------------------------------------------------------------------------------


class Watching(Net):
    """Says in which dtypes it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 8))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {"input": x.dtype, "table": self.table.dtype, "weight": self.head.weight.dtype}
        self.seen["statistics"] = self.norm.running_mean.dtype
        x = self.norm(x) * self.table.to(x.dtype)
        self.seen["block"] = self.blocks[0](x.float() if self.seen["input"] is not x.dtype else x).dtype
        return super().forward(x)


def _bf16(doors: Any, **options: Any) -> dict[str, Any]:
    mixed = doors[0].MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, **options)
    model = by_policy(doors, build(Watching), mixed_precision=mixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = loss_of(model, batch(step, my_rank()))
        loss.backward()
        grads = {p.grad.dtype for p in model.parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "seen": model.module.seen, "grads": grads, "state": model.state_dict()}


def _precisions() -> None:
    warnings.simplefilter("ignore")
    half = torch.bfloat16
    for options in ({}, {"buffer_dtype": half}):
        mine, theirs = (_bf16(doors, **options) for doors in (ours(), real()))
        assert mine["seen"] == theirs["seen"], options
        assert mine["seen"]["weight"] == mine["seen"]["input"] == half
        assert mine["grads"] == theirs["grads"] == {torch.float32}
        assert {k: v.dtype for k, v in mine["state"].items()} == {
            k: v.dtype for k, v in theirs["state"].items()
        }
        assert mine["state"]["table"].dtype == torch.float32, "saved as it was built"
        for name, value in theirs["state"].items():
            if "norm" not in name:
                reference.assert_close(mine["state"][name], value, name, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(
            torch.tensor(mine["losses"]), torch.tensor(theirs["losses"]), rtol=2e-2, atol=2e-2
        )


def test_mixed_precision_computes_and_saves_in_the_dtypes_of_the_real_one() -> None:
    ranks.run(_precisions, 2, init=True, timeout_s=120)


class Lookup(nn.Module):
    """Hands its block an fp32 table, as rotary embeddings are."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x, torch.ones(8))
        return out


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.got: list[torch.dtype] = []

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        self.got = [x.dtype, table.dtype]
        return self.linear(x) * table.to(x.dtype)


def _ignored_buffers() -> None:
    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP
    from fullshard.torch_fsdp import MixedPrecision

    half = torch.bfloat16
    model = build(Watching)
    model.blocks[0].register_buffer("own", torch.ones(3))
    model.blocks[1].register_buffer("own", torch.ones(3))
    left = model.blocks[0]
    wrapped = FSDP(model, mixed_precision=MixedPrecision(half, half, half), ignored_modules=[left])
    list(wrapped.parameters())
    found = {name: buffer.dtype for name, buffer in wrapped.named_buffers() if "norm" not in name}
    assert found == {"table": half, "blocks.0.own": torch.float32, "blocks.1.own": half}, found


def test_buffers_of_ignored_modules_keep_their_dtype() -> None:
    ranks.run(_ignored_buffers, 2, init=True, timeout_s=60)


def _casts() -> None:
    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP
    from fullshard.torch_fsdp import MixedPrecision

    half, full = torch.bfloat16, torch.float32
    for options, expected in (
        ({}, [half, full]),  # the root's inputs alone
        ({"cast_forward_inputs": True}, [half, half]),
        ({"cast_root_forward_inputs": False, "cast_forward_inputs": True}, [half, half]),
    ):
        model = Lookup()
        mixed = MixedPrecision(param_dtype=half, **options)
        model.block = FSDP(model.block, mixed_precision=mixed)
        wrapped = FSDP(model, mixed_precision=mixed)
        wrapped(torch.randn(2, 8)).sum().backward()
        assert model.block.module.got == expected, options
    model = Lookup().to(half)
    wrapped = FSDP(model, mixed_precision=MixedPrecision(param_dtype=half))
    assert {p.dtype for p in wrapped.parameters()} == {half}, "what is bf16 already stays bf16 at rest"
    assert wrapped(torch.randn(2, 8)).dtype == half
    # one block in another precision than the rest
    model = Lookup()
    model.block = FSDP(
        model.block, mixed_precision=MixedPrecision(param_dtype=half, cast_forward_inputs=True)
    )
    wrapped = FSDP(model)
    assert wrapped(torch.randn(2, 8)).dtype == half
    assert model.block.module.got == [half, half]


def _scaled() -> list[float]:
    from fullshard.torch_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP
    from fullshard.torch_fsdp.sharded_grad_scaler import ShardedGradScaler

    model = FSDP(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=8.0, process_group=torch.distributed.group.WORLD)
    scales = []
    for factor in (1.0, float("inf") if my_rank() == 1 else 1.0, 1.0):
        before = model.state_dict()
        scaler.scale(loss_of(model, batch(0, my_rank())) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        stayed = torch.equal(before["head.weight"], model.state_dict()["head.weight"])
        scales.append(scaler.get_scale() if not stayed else -scaler.get_scale())
    return scales


def test_scaler_skips_on_all_ranks_a_step_that_one_rank_spoils() -> None:
    assert ranks.run(_scaled, 2, init=True, timeout_s=120) == [[8.0, -4.0, 4.0]] * 2


def test_inputs_are_cast_where_mixed_precision_says() -> None:
    ranks.run(_casts, 2, timeout_s=120)


# --- values from elsewhere -------------------------------------------------------------------------------


def _from_meta() -> None:
    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP

    def ones(module: nn.Module) -> None:
        module.to_empty(device=torch.device("cpu"), recurse=False)  # as torch asks of it
        for parameter in module._parameters.values():
            if parameter is not None:
                nn.init.constant_(parameter, 2.0)

    with torch.device("meta"):
        model = Net()
    wrapped = by_policy(ours(), model, param_init_fn=ones)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    assert all(v.eq(2).all() for v in wrapped.state_dict().values())
    loss_of(wrapped, batch(0, my_rank())).backward()
    optimizer.step()

    with torch.device("meta"):
        model = Net()
    torch.manual_seed(my_rank())
    wrapped = FSDP(model)  # reset_parameters, and the first rank's values count
    whole = wrapped.state_dict()
    everyone: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyone, whole)
    assert_values(everyone[0], everyone[1], "from reset_parameters")


def _shown_on_meta() -> None:
    """A function that looks whether the module is on meta, as those written for torch do; and one that only
    fills what it finds."""

    def reset(module: nn.Module) -> None:
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(t.is_meta for t in own):
            module.to_empty(device=torch.device("cpu"), recurse=False)
            fill(module)

    @torch.no_grad()
    def fill(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(3.0)

    for given in (reset, fill):
        with torch.device("meta"):
            model = Tied()
        before = dict(model.named_parameters())
        wrapped = by_policy(ours(), model, param_init_fn=given)
        assert all(value.eq(3).all() for value in wrapped.state_dict().values()), given
        assert all(p is before[name] for name, p in wrapped.named_parameters()), "the same objects"
        loss_of(wrapped, batch(0, my_rank())).backward()


def test_param_init_fn_is_shown_a_module_on_meta() -> None:
    ranks.run(_shown_on_meta, 2, init=True, timeout_s=60)


class Layered(nn.Module):
    """Modules with tensors of their own around others: a buffer alone, or a parameter."""

    def __init__(self, inside: list[nn.Module], parameter: bool) -> None:
        super().__init__()
        self.inside = nn.ModuleList(inside)
        self.register_buffer("shift", torch.ones(3))
        if parameter:
            self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.inside:
            x = each(x)
        return x + self.shift


def _recursive() -> None:
    """What begins with `to_empty` of a whole subtree, or goes through one, must not undo what is done."""
    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP
    from fullshard.torch_fsdp.wrap import ModuleWrapPolicy

    def fill(module: nn.Module) -> None:
        fan = module.weight.shape[1] if isinstance(module, nn.Linear) else 0
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.data.fill_(2.0 + fan)

    def emptied(module: nn.Module) -> None:
        module.to_empty(device="cpu")
        fill(module)

    def parameters_anew(module: nn.Module) -> None:
        for name, p in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(torch.full_like(p, 2.0, device="cpu")))
        fill(module)

    for given in (emptied, lambda module: module.apply(fill), parameters_anew):
        for policy in (None, ModuleWrapPolicy({Layered}), ModuleWrapPolicy({nn.Linear})):
            with torch.device("meta"):
                blocks = [
                    Layered([nn.Linear(3, 3), nn.Linear(3, 3)], parameter) for parameter in (True, False)
                ]
                model = Layered([nn.Linear(3, 3), *blocks], parameter=True)
                blocks[1].inside[0].weight = model.inside[0].weight
            wrapped = FSDP(model, auto_wrap_policy=policy, param_init_fn=given, device_id="cpu:0")
            for name, value in wrapped.state_dict().items():
                expected = 2.0 if name.endswith(("shift", "scale")) else 5.0
                assert value.eq(expected).all(), (given, policy, name, value)


def test_param_init_fn_may_go_into_the_modules_inside() -> None:
    ranks.run(_recursive, 2, init=True, timeout_s=60)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.register_buffer("table", torch.linspace(0, 1, 7))


def _rank_zero_has_it() -> None:
    """The first rank has read the model, the others are on meta."""
    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP

    for init in (None, lambda m: m.to_empty(device=torch.device("cpu"), recurse=False)):
        if my_rank() == 0:
            model = build(Tied, seed=9)
        else:
            with torch.device("meta"):
                model = Tied()
        before = dict(model.named_parameters())
        wrapped = by_policy(ours(), model, sync_module_states=True, param_init_fn=init)
        assert_values(wrapped.state_dict(), dict(build(Tied, seed=9).state_dict()), "from the first rank")
        assert all(p is before[n] for n, p in wrapped.named_parameters()), "the same objects"
        loss_of(wrapped, batch(0, my_rank())).backward()
    different = build(Net, seed=my_rank())
    assert_values(
        FSDP(different).state_dict(), dict(build(Net, seed=0).state_dict()), "the first rank's count"
    )


def test_values_come_from_param_init_fn_or_from_the_first_rank() -> None:
    ranks.run(_from_meta, 2, init=True, timeout_s=120)
    ranks.run(_rank_zero_has_it, 3, init=True, timeout_s=120)


# --- summon_full_params ----------------------------------------------------------------------------------


def _summoned() -> None:
    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP

    plain = build()
    for rank in range(2):
        (loss_of(plain, batch(0, rank)) / 2).backward()
    values = dict(plain.named_parameters())
    model = by_hand(ours(), build())
    rest = {n: p.shape for n, p in model.named_parameters()}
    loss_of(model, batch(0, my_rank())).backward()
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        for name, p in model.named_parameters():
            reference.assert_close(p.detach(), values[name].detach(), name)
            reference.assert_close(p.grad, values[name].grad, f"gradient of {name}")
            p.grad.zero_()  # does not count
    assert {n: p.shape for n, p in model.named_parameters()} == rest
    assert float(model.clip_grad_norm_(1e9)) == pytest.approx(
        float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9)), rel=1e-5
    )
    with FSDP.summon_full_params(model, with_grads=True), torch.no_grad():
        for p in model.parameters():
            p.grad.mul_(2)
        model.head.weight.fill_(3.0)
    assert model.state_dict()["head.weight"].eq(3).all()
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        assert torch.allclose(model.head.weight.grad, 2 * values["head.weight"].grad)
    with FSDP.summon_full_params(model, rank0_only=True, writeback=False, offload_to_cpu=True):
        shapes = {n: p.shape for n, p in model.named_parameters()}
        assert (shapes == {n: p.shape for n, p in values.items()}) == (my_rank() == 0)
        assert (shapes == rest) == (my_rank() != 0)
    with FSDP.summon_full_params(model.blocks[1], recurse=False):
        assert model.blocks[1][0].weight.shape == (13, 8)
        assert model.head.weight.shape != (5, 8)
    with FSDP.summon_full_params(model, recurse=False):
        assert model.blocks[1][0].weight.shape != (13, 8), "the root's own parameters alone, and it has none"
    around = nn.ModuleDict({"a": plainly(ours(), build()), "b": plainly(ours(), build(seed=1))})
    with FSDP.summon_full_params(around):
        assert around["a"].head.weight.shape == around["b"].head.weight.shape == (5, 8)
    loss_of(model, batch(1, my_rank())).backward()  # goes on


def test_summoned_parameters_and_gradients_are_whole_and_edits_count() -> None:
    ranks.run(_summoned, 2, init=True, timeout_s=120)


def _stepped_back(model: Any, pieces: list[int]) -> list[float]:
    """Sharpness-aware: a step up the gradient, a second pass there, and back by assigning `p.data`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        before = []
        for is_up in (True, False):
            parts = [loss_of(model, batch(step, rank)) for rank in pieces]
            losses.append(sum(part.item() for part in parts) / len(parts))
            (sum(parts) / len(parts)).backward()
            for p in model.parameters() if is_up else ():
                before.append(p.data.clone())
                p.data = p.data + 0.5 * p.grad
            if is_up:
                optimizer.zero_grad()
        for p, value in zip(model.parameters(), before, strict=True):
            p.data = value
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _assigned() -> list[Any]:
    from fullshard.errors import StateError
    from fullshard.torch_fsdp import FullyShardedDataParallel as FSDP
    from fullshard.torch_fsdp import ShardingStrategy

    found: list[Any] = []
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        model = by_policy(ours(), build(), sharding_strategy=ShardingStrategy[strategy])
        losses = _stepped_back(model, [my_rank()])
        found.append((losses, model.state_dict()))
    model = FSDP(build())
    whole = model.state_dict()
    for name, p in model.named_parameters():
        p.data = whole[name]
    with pytest.raises(StateError, match="Assign unsharded values"):
        loss_of(model, batch(0, 0))
    return found


def test_values_assigned_to_data_count_in_the_next_pass() -> None:
    alone = build()
    losses = _stepped_back(alone, [0, 1])
    first, second = ranks.run(_assigned, 2, init=True, timeout_s=90)
    for (mine, state), (theirs, _) in zip(first, second, strict=True):
        assert_values(state, dict(alone.state_dict()), "stepped back")
        assert [(a + b) / 2 for a, b in zip(mine, theirs, strict=True)] == pytest.approx(losses, rel=1e-5)
